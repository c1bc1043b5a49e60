"""Train LoRA adapters of a frozen model in a loop of Accelerate: one import changes.

    python examples/accelerate_lora.py
    torchrun --nproc-per-node 2 examples/accelerate_lora.py              # or: accelerate launch

Needs accelerate and peft: pip install 'autopar[hf,accelerate,peft]'. Without get_peft_model it is full fine-tuning.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from autopar.integrations.accelerate import Accelerator  # was: from accelerate import Accelerator

LENGTH, BATCH = 32, 16


def main(steps: int, folder: str) -> None:
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=64, n_positions=LENGTH))
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=32, target_modules=["c_attn", "c_proj", "c_fc"]))
    texts = (torch.randint(64, (2 * BATCH * steps, 1)) + torch.arange(LENGTH)) % 64  # they count up
    loader = DataLoader(TensorDataset(texts), batch_size=BATCH, collate_fn=as_batch)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    accelerator = Accelerator(gradient_accumulation_steps=2, split_batches=True)  # BATCH is of all processes together
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and step % 10 == 1:
            accelerator.print(f"step {step // 2}: loss {loss.item():.4f}")
    weights = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        folder, is_main_process=accelerator.is_main_process, state_dict=weights
    )
    accelerator.print(f"adapter_model.safetensors is in {folder}; last loss {loss.item():.4f}")


def as_batch(rows: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([row[0] for row in rows])
    return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", default="adapter")
    main(**vars(parser.parse_args()))
