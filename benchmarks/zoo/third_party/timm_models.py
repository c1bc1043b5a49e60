"""timm: image classifiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.registry import Inputs, ZooEntry

PACKAGES = ("timm",)


def _images(side: int) -> Callable[[int], Inputs]:
    return lambda batch: {"x": torch.randn(batch, 3, side, side), "labels": torch.randint(0, 10, (batch,))}


def _cross_entropy(output: Any, batch: Inputs) -> Tensor:
    return functional.cross_entropy(output, batch["labels"])


def _entry(name: str, side: int = 64, **arguments: Any) -> ZooEntry:
    def build() -> nn.Module:
        model: nn.Module = timm.create_model(name, num_classes=10, **arguments)
        return model

    return ZooEntry(name=f"timm/{name}", family="vision", build=build, inputs=_images(side), loss_fn=_cross_entropy)


ENTRIES = (
    _entry("resnet10t"),
    _entry("vit_tiny_patch16_224", img_size=64, depth=3),
)
