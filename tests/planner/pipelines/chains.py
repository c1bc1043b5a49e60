"""A chain of layers in stages: each layer hands on one tensor that backward reads, so spans decide what it holds."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.plans.parallel_plan import Plan

DEPTH, WIDTH, ROWS, PARTS = 16, 8, 1024, 4
ACTIVATION = ROWS * WIDTH * 8
STATES = DEPTH // 2 * (WIDTH + 1) * WIDTH * 8 * 3
"""Parameters and two states of a stage."""


class Chain(nn.Module):
    """forward(x (4096, 8)) -> mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def chain() -> nn.Module:
    """With the same weights whenever it is made."""
    torch.manual_seed(0)
    return Chain().double()


def batch() -> Tensor:
    """(4096, 8) rows."""
    return torch.randn(PARTS * ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@functools.cache
def planned(
    activations: float, schedule: str = "1f1b", devices: int = 1, cluster: str | None = None, **options: Any
) -> Plan:
    """The chain in two stages of eight layers, four micro-batches, with room for so many activations of a device."""
    dims = {"pp": 2} if devices == 1 else {"pp": 2, "dp_shard": devices}
    return planner(cluster or f"{2 * devices} cpu").plan(
        dims=dims,
        schedule=schedule,
        micro_batches=PARTS,
        memory_limit=activations * ACTIVATION,
        mode="fast",
        **options,
    )


@functools.cache
def planner(cluster: str) -> autopar.Planner:
    """Traces the chain once; holds it, as its plans ask for it again."""
    return autopar.Planner(chain(), batch(), cluster=cluster)


def most_passes(plan: Plan) -> int:
    """How often backward runs a layer of forward again, at most."""
    again = [operator for name, operator in plan.operators.items() if operator.recompute and "tanh" in name]
    return max((1 + len(operator.recompute_at) for operator in again), default=0)
