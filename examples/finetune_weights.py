"""Fine-tune pretrained weights of Hugging Face, evaluate, generate, and save a folder that `from_pretrained` reads.

    python examples/finetune_weights.py
    torchrun --nproc-per-node 2 examples/finetune_weights.py

No process holds the whole model: it is built without weights, and each process reads its parts of the files.
Needs transformers. The pretrained folder is made here, with random weights; of a folder of your own, CONFIG is
AutoConfig.from_pretrained(folder).
"""

import argparse
import os
import string
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config

import autopar

LENGTH, BATCH = 32, 8
TEXT = "the quick brown fox jumps over the lazy dog. " * 200
LETTERS = string.ascii_lowercase + " ."  # a tokenizer of one letter each
CONFIG = GPT2Config(
    n_layer=1, n_embd=64, n_head=4, vocab_size=len(LETTERS), n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def batch_at(step: int) -> dict[str, torch.Tensor]:
    letters = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    starts = torch.randint(len(letters) - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = letters[starts + torch.arange(LENGTH)]
    return {"input_ids": tokens, "labels": tokens}


def main(steps: int, folder: str) -> None:
    pretrained, finetuned = Path(folder, "pretrained"), Path(folder, "finetuned")
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:  # the other processes wait for this one in `compile`
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(pretrained)

    with torch.device("meta"):  # shapes, no weights
        model = AutoModelForCausalLM.from_config(CONFIG)
    dims = {"dp_shard": -1}  # ZeRO-3. Without dims the best plan is searched: for so small a model, no split at all
    module = autopar.compile(model, batch_at(0), optimizer=torch.optim.AdamW, weights=pretrained, dims=dims)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for step in range(steps):
        loss = module(**batch_at(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_first and (step % 10 == 0 or step == steps - 1):
            print(f"step {step}: loss {loss:.4f}")

    module.eval()
    with torch.no_grad():
        loss = module(**batch_at(-1)).loss
    prompt = torch.tensor([[LETTERS.index(letter) for letter in "the quick"]])
    answer = module.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)[0]  # on every process
    module.save_pretrained(finetuned)  # so is this
    if is_first:
        print(f"perplexity {loss.exp():.2f}; {''.join(LETTERS[token] for token in answer)!r}")
        print(f"{type(AutoModelForCausalLM.from_pretrained(finetuned)).__name__} read again from {finetuned}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default="finetune")
    main(**vars(parser.parse_args()))
