"""Plan a mixture of experts for a cluster that you do not have, change the plan, and train a small one here.

    python examples/experts_on_a_cluster.py
    torchrun --nproc-per-node 2 examples/experts_on_a_cluster.py         # only the training needs processes

Planning needs no GPU and no weights: the large model is on torch's meta device.
"""

import argparse
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar

CHOSEN = 2  # experts of a token


class Experts(nn.Module):
    """Every token goes through its two best experts; the loop is the usual one of plain torch."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = F.softmax(self.router(rows), -1).topk(CHOSEN, dim=-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            out.index_add_(0, token, expert(rows[token]) * weights[token, choice, None])
        return x + out.view_as(x)


class Model(nn.Module):
    def __init__(self, vocabulary: int, width: int, experts: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Experts(width, experts) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch_of(size: int, length: int, vocabulary: int, seed: int = 0) -> dict[str, Tensor]:
    """The label of a token is the next one of the alphabet."""
    tokens = torch.randint(vocabulary, (size, length), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "labels": (tokens + 1) % vocabulary}


def plan_for_16_gpus() -> None:
    with torch.device("meta"):
        large = Model(vocabulary=32_000, width=2048, experts=4, layers=1)
    batch = batch_of(64, 1024, 32_000)
    plan = autopar.plan(large, batch, cluster="2x8 H100-SXM", optimizer=torch.optim.AdamW, mode="fast")
    print(*plan.summary().splitlines()[:2], sep="\n")  # the whole of it lists known plans and every layout
    edited = plan.edit({"head.weight": "R"})  # what would a copy of the head on every GPU cost?
    before, after = plan.predicted.step_seconds, edited.predicted.step_seconds
    print(f"predicted step: {before:.4f} s, with the edit {after:.4f} s")
    plan.save("experts.json")  # on the cluster: autopar run --plan experts.json -- train.py


def main(steps: int) -> None:
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        plan_for_16_gpus()
    torch.manual_seed(0)
    module = autopar.compile(Model(64, 32, 4, 1), batch_of(16, 16, 64), optimizer=torch.optim.AdamW)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for step in range(steps):
        loss = module(**batch_of(16, 16, 64, seed=step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_first and (step % 5 == 0 or step == steps - 1):
            print(f"step {step}: loss {loss:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    main(**vars(parser.parse_args()))
