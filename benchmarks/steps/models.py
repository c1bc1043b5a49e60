"""Ten small models that differ in what they spend their time on; a step takes 20 to 300 ms on one core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.models import (
    Inputs,
    bert,
    gpt2,
    images_and_labels,
    images_and_masks,
    llama,
    olmoe,
    t5,
    token_inputs,
    vit,
)
from benchmarks.vision import ResNet, UNet

SEED = 0


class Recommender(nn.Module):
    """Embedding tables, dot products with the user's, and a small tower. forward(users, items (B, F), labels (B,))."""

    def __init__(self, *, rows: int, width: int, fields: int, hidden: int) -> None:
        super().__init__()
        self.users = nn.Embedding(rows, width)
        self.items = nn.Embedding(rows, width)
        self.tower = nn.Sequential(
            nn.Linear(width * (fields + 1) + fields, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.head = nn.Linear(hidden, 2)

    def forward(self, users: torch.Tensor, items: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        user, chosen = self.users(users), self.items(items)
        likeness = (chosen * user[:, None]).sum(-1)
        hidden = self.tower(torch.cat([user, chosen.flatten(1), likeness], dim=1))
        return nn.functional.cross_entropy(self.head(hidden), labels)


class Mlp(nn.Module):
    """Wide linear layers, nothing else. forward(x (B, width), y (B, width)) -> mean squared error."""

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """build: makes the module; inputs: makes its keywords, global batch."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]


def _recommendations(batch: int, rows: int, fields: int) -> Inputs:
    return {
        "users": torch.randint(0, rows, (batch,)),
        "items": torch.randint(0, rows, (batch, fields)),
        "labels": torch.randint(0, 2, (batch,)),
    }


def _pictures(batch: int, size: int, classes: int) -> Inputs:
    return {"images": torch.randn(batch, 3, size, size), "labels": torch.randint(0, classes, (batch,))}


MODELS: dict[str, SmallModel] = {
    "gpt2": SmallModel(
        build=lambda: gpt2(layers=4, width=256, heads=4, vocabulary=2048, positions=128),
        inputs=lambda: token_inputs(2048)(8, 128),
    ),
    "llama": SmallModel(
        build=lambda: llama(layers=4, width=256, hidden=768, heads=8, kv_heads=4, vocabulary=2048, positions=128),
        inputs=lambda: token_inputs(2048)(8, 128),
    ),
    "bert": SmallModel(
        build=lambda: bert(layers=3, width=256, heads=4, vocabulary=4096, positions=128),
        inputs=lambda: token_inputs(4096)(8, 96),
    ),
    "t5": SmallModel(
        build=lambda: t5(layers=2, width=256, heads=4, vocabulary=2048),
        inputs=lambda: token_inputs(2048)(8, 96),
    ),
    "olmoe": SmallModel(
        build=lambda: olmoe(layers=2, width=128, hidden=256, heads=4, experts=8, chosen=2, vocabulary=1024),
        inputs=lambda: token_inputs(1024)(8, 64),
    ),
    "vit": SmallModel(
        build=lambda: vit(layers=4, width=192, heads=4, size=64, patch=8, classes=64),
        inputs=lambda: images_and_labels(64)(16, 64),
    ),
    "resnet": SmallModel(
        build=lambda: ResNet(width=32, blocks=(2, 2, 2), classes=32),
        inputs=lambda: _pictures(16, 32, 32),
    ),
    "unet": SmallModel(
        build=lambda: UNet(channels=(32, 64, 128), classes=8),
        inputs=lambda: images_and_masks(8)(4, 48),
    ),
    "recommender": SmallModel(
        build=lambda: Recommender(rows=20000, width=64, fields=16, hidden=1024),
        inputs=lambda: _recommendations(256, 20000, 16),
    ),
    "mlp": SmallModel(
        build=lambda: Mlp(width=1024, layers=6),
        inputs=lambda: {"x": torch.randn(128, 1024), "y": torch.randn(128, 1024)},
    ),
}


def small_model(name: str) -> tuple[nn.Module, Inputs]:
    """The model and one global batch, the same in every process."""
    torch.manual_seed(SEED)
    entry = MODELS[name]
    return entry.build().train(), entry.inputs()
