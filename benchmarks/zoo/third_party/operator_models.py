"""neuraloperator: operators between functions on grids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from neuralop.models import FNO, TFNO, UNO
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.registry import Inputs, ZooEntry

PACKAGES = ("neuralop", "tensorly")


def _fields(output: Any, batch: Inputs) -> Tensor:
    return functional.mse_loss(output, batch["target"])


def _entry(name: str, build: Callable[[], nn.Module]) -> ZooEntry:
    return ZooEntry(
        name=f"neuralop/{name}",
        family="vision",
        build=build,
        inputs=lambda batch: {"x": torch.randn(batch, 1, 16, 16), "target": torch.randn(batch, 1, 16, 16)},
        loss_fn=_fields,
    )


_SIZES: dict[str, Any] = {"in_channels": 1, "out_channels": 1, "hidden_channels": 8}
ENTRIES = (
    _entry("fno", lambda: FNO(n_modes=(4, 4), n_layers=2, **_SIZES)),
    _entry("tfno", lambda: TFNO(n_modes=(4, 4), n_layers=2, rank=0.5, factorization="tucker", **_SIZES)),
    _entry(
        "uno",
        lambda: UNO(n_layers=3, channel_mlp_skip="linear", uno_out_channels=[8, 8, 8], uno_n_modes=[[4, 4]] * 3,
                    uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]], **_SIZES),
    ),
)  # fmt: skip
