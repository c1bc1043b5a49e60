"""Small runs on one process that are saved and loaded: compiled once, their values set by each test."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

import autopar
from autopar.runtime.checkpoints.training_state import flat_state
from autopar.runtime.parameters import full_tensor


class Layers(nn.Module):
    """forward(x (B, 4)) -> scalar, with dropout, a parameter without gradients and a buffer."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self.head = nn.Linear(4, width)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(self.dropout(x))) * self.frozen
        loss: torch.Tensor = (self.head(x) * self.scale).pow(2).mean()
        return loss


@cache
def compiled(count: int = 2, width: int = 3) -> autopar.ParallelModule:
    """The same module at every call: tests set what they need."""
    torch.manual_seed(0)
    return autopar.compile(Layers(count, width), torch.ones(8, 4), mode="fast")


def trained(
    module: autopar.ParallelModule, optimizer: torch.optim.Optimizer, steps: range, scheduler: Any = None
) -> list[float]:
    """The losses of these steps."""
    losses = []
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = module(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def filled(module: autopar.ParallelModule, value: float) -> None:
    """Give every parameter and buffer this value."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(value)


def bits(module: autopar.ParallelModule, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Everything that a load may change, to be compared for equality bit by bit."""
    return {
        name: full_tensor(value).numpy().tobytes() if isinstance(value, torch.Tensor) else value
        for name, value in flat_state(module, optimizer).items()
    }
