"""Train with the Trainer of transformers: one import changes, the rest is a Trainer script as it always was.

    python examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py

Needs accelerate: pip install 'autopar[hf,accelerate]'.
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from autopar.integrations.transformers import Trainer  # was: from transformers import Trainer

LENGTH = 32


class Counting(Dataset):
    """Texts that count up from a random number, modulo the size of the vocabulary."""

    def __init__(self, count: int, seed: int) -> None:
        starts = torch.randint(64, (count, 1), generator=torch.Generator().manual_seed(seed))
        self.tokens = (starts + torch.arange(LENGTH)) % 64

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main(steps: int, folder: str) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=64, n_positions=LENGTH))
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Counting(8192, seed=1), eval_dataset=Counting(32, seed=2)
    )
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model(f"{folder}/model")  # GPT2LMHeadModel.from_pretrained reads it anywhere
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"first loss {losses[0]:.4f}, last loss {losses[-1]:.4f}, held out {found['eval_loss']:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default="trainer_run")
    main(**vars(parser.parse_args()))
