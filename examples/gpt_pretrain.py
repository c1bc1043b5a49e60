"""Pretrain a small GPT on the sources of Python's standard library, byte by byte.

    python examples/gpt_pretrain.py --steps 200
    torchrun --nproc-per-node 2 examples/gpt_pretrain.py --steps 200

Every process passes the same whole batch, and computes the part that the plan gives to it. With clipping, a learning
rate that warms up, evaluation on held-out text, and a checkpoint at the end.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 4, 2, 64, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def batch_at(text: Tensor, step: int) -> dict[str, Tensor]:
    """The batch of a step: drawn from the step's number, so it is the same on every process."""
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    rows = text[starts + torch.arange(LENGTH + 1)]
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def main(steps: int, folder: str) -> None:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:50]
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()
    train, held_out = text[:-20_000], text[-20_000:]

    torch.manual_seed(0)
    dims = {"dp_shard": -1}  # ZeRO-3. Without dims the best plan is searched: for so small a model, no split at all
    model = autopar.compile(GPT(), batch_at(train, 0), optimizer=torch.optim.AdamW, dims=dims)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    is_first = os.environ.get("RANK", "0") == "0"  # torchrun numbers its processes
    for step in range(steps):
        loss = model(**batch_at(train, step))
        loss.backward()
        autopar.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if is_first and (step % 10 == 0 or step == steps - 1):
            print(f"step {step}: loss {loss:.4f}")

    model.eval()
    with torch.no_grad():
        losses = [float(model(**batch_at(held_out, step))) for step in range(4)]  # on every process
    autopar.save(folder, model, optimizer, step=steps, extra={"scheduler": scheduler})
    if is_first:
        print(f"held out: {sum(losses) / len(losses):.4f}; saved in {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--folder", default="gpt_checkpoint")
    main(**vars(parser.parse_args()))
