"""Train a convolutional network with a DataLoader, as under DDP: every process loads its own part of each batch.

    python examples/image_classifier.py
    torchrun --nproc-per-node 2 examples/image_classifier.py

`batch="local"` says so, and `module.data_shard()` says which part: a sampler takes it as rank and num_replicas. The
images are made up: noisy stripes in four directions.
"""

import argparse
import itertools
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import autopar

BATCH, SIZE, CLASSES = 32, 16, 4  # BATCH: of all processes together


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.layers(images).mean(dim=(2, 3)))
        return {"loss": F.cross_entropy(scores, labels), "accuracy": (scores.argmax(-1) == labels).float().mean()}


def stripes(count: int, seed: int) -> TensorDataset:
    """`count` images (1, SIZE, SIZE) with the direction of their stripes."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draws)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    patterns = torch.stack([rows, columns, rows + columns, rows - columns]).remainder(4).float() - 1.5
    return TensorDataset(patterns[labels, None] + 0.5 * torch.randn(count, 1, SIZE, SIZE, generator=draws), labels)


def main(steps: int) -> None:
    torch.manual_seed(0)
    example = {"images": torch.zeros(BATCH, 1, SIZE, SIZE), "labels": torch.zeros(BATCH, dtype=torch.int64)}
    dims = {"dp_replicate": -1}  # DDP. Without dims the best plan is searched: for so small a model, no split at all
    module = autopar.compile(Network(), example, optimizer=torch.optim.AdamW, batch="local", dims=dims)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)

    index, count = module.data_shard()  # not the rank: processes that split a layer share their samples
    sampler = DistributedSampler(stripes(640, seed=1), num_replicas=count, rank=index)
    loader = DataLoader(sampler.dataset, batch_size=BATCH // count, sampler=sampler, drop_last=True)
    is_first = os.environ.get("RANK", "0") == "0"
    step = 0
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for images, labels in itertools.islice(loader, steps - step):
            out = module(images=images, labels=labels)
            out["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            if is_first and (step % 5 == 0 or step == steps - 1):  # both are of the whole batch
                print(f"step {step}: loss {out['loss']:.4f}, accuracy {out['accuracy']:.2f}")
            step += 1
        if step >= steps:
            return


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    main(**vars(parser.parse_args()))
