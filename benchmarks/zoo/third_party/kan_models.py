"""pykan: networks with a spline on every edge."""

from __future__ import annotations

from typing import Any

import torch
from kan import KAN
from torch import Tensor
from torch.nn import functional

from benchmarks.zoo.registry import Inputs, ZooEntry

PACKAGES = ("kan", "sympy", "sklearn", "matplotlib", "pandas")


def _squares(output: Any, batch: Inputs) -> Tensor:
    return functional.mse_loss(output, batch["target"])


def _entry(name: str, **arguments: Any) -> ZooEntry:
    return ZooEntry(
        name=f"kan/{name}",
        family="tabular",
        build=lambda: KAN(grid=3, k=3, auto_save=False, **arguments),
        inputs=lambda batch: {"x": torch.rand(batch, 4), "target": torch.randn(batch, 2)},
        batch=16,
        loss_fn=_squares,
    )


ENTRIES = (
    _entry("additive", width=[4, 8, 2]),
    _entry("multiplicative", width=[4, [4, 4], 2]),
    _entry("splines_only", width=[4, 8, 8, 2], symbolic_enabled=False, save_act=False),
)
