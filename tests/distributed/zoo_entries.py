"""Entries with a planted fault each, for the test of the runner: one is sound, the others break in their own way."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn

from benchmarks.zoo.registry import Inputs, ZooEntry


class Regression(nn.Module):
    """forward(x, target) -> mean squared error. What captures it gets a result that is scaled by `captured_scale`."""

    def __init__(self, captured_scale: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.captured_scale = captured_scale

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(self.down(torch.tanh(self.up(x))), target)
        return loss * self.captured_scale if type(x) is not Tensor else loss


def _inputs(batch: int) -> Inputs:
    return {"x": torch.randn(batch, 8), "target": torch.randn(batch, 4)}


def _raises() -> nn.Module:
    raise ValueError("planted: no such model")


def _hangs() -> nn.Module:
    time.sleep(600)
    return Regression()


def _dies() -> nn.Module:
    os._exit(3)


class DependsOnData(Regression):
    """Branches on a value, which no graph can hold."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = super().forward(x, target)
        return loss if float(loss) > 0 else -loss


ENTRIES = (
    ZooEntry(name="sound", family="plain", build=Regression, inputs=_inputs),
    ZooEntry(name="wrong", family="plain", build=lambda: Regression(1.001), inputs=_inputs),
    ZooEntry(name="raises", family="plain", build=_raises, inputs=_inputs),
    ZooEntry(name="hangs", family="plain", build=_hangs, inputs=_inputs),
    ZooEntry(name="dies", family="plain", build=_dies, inputs=_inputs),
    ZooEntry(name="depends on data", family="plain", build=DependsOnData, inputs=_inputs),
)
