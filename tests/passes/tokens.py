"""Linear layers on (batch, positions, width), and their plans with tensor and sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from autopar.layouts.placement import Mesh, Shard
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from tests.passes.hand_plans import hand_plan, picked
from tests.passes.lowering.test_lower import Case

FLAT = Mesh(("tp",), (4,))
WIDTH, HIDDEN = 8, 12
"""Of the gated layer."""


class Tokens(nn.Module):
    """Two linear layers on (batch, positions, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 2 * width, bias=False)
        self.proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.fc(torch.tanh(x)))
        loss: torch.Tensor = ((torch.tanh(self.proj(hidden)) - y) ** 2).mean()
        return loss


def sequence_parallel(case: Case, dim: int) -> Plan:
    """Hidden units split, and what stands around the two products split along `dim` of the activations."""
    hidden = {"fc/mm#0": "n", "/gelu#0": "d2", "proj/mm#0": "k"}
    hidden |= {"proj/mm#0/bwd": "n", "proj/mm#1/bwd": "m", "/gelu_backward#0/bwd": "d2", "fc/mm#0/bwd": "m"}
    hidden |= {"fc/mm#1/bwd": "k"}
    around = ("tanh", "sub", "pow", "mul")

    def pick(node: fx.Node, rule: Any) -> list[str | None]:
        name = str(node.meta["operator"])
        if name in hidden:
            return [hidden[name]]
        base = str(node.target).split(".")[1]
        return [f"d{dim}" if base.startswith(around) and f"d{dim}" in rule.names else None]

    operators = picked(case.program, FLAT, pick)
    inputs = {i.name: (Shard(dim),) for i in case.program.inputs if i.role == "input"}
    return hand_plan(case.program, FLAT, operators, {}, inputs)


class Gated(nn.Module):
    """A gated layer on (batch, positions, width): two products of the same rows, one behind them."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = torch.tanh(x * self.scale)
        loss: torch.Tensor = ((torch.tanh(self.down(torch.tanh(self.gate(rows)) * self.up(rows))) - y) ** 2).mean()
        return loss


def split_as_megatron_does(program: Program, mesh: Mesh, dim: int) -> Plan:
    """Hidden units of a gated layer split, and `dim` of the activations around them: gathers and scatters in both
    passes."""
    hidden = next(i.shape[0] for i in program.inputs if i.name == "up.weight")

    def pick(node: fx.Node, rule: Any) -> list[str | None]:
        name, shape = str(node.meta["operator"]), tuple(node.meta["val"].shape)
        if node.target is torch.ops.aten.mm.default:
            return [product(name, node, shape)]
        wanted = "d2" if shape[-1:] == (hidden,) and len(shape) == 3 else f"d{dim}"
        return [wanted if len(shape) == 3 and wanted in rule.names else None]

    def product(name: str, node: fx.Node, shape: tuple[int, ...]) -> str:
        is_first = not name.startswith("down")
        if node.meta["phase"] == "forward":
            return "n" if is_first else "k"
        if node.args[0].target is torch.ops.aten.permute.default:  # type: ignore[union-attr]
            return "m" if is_first else "n"
        return "k" if is_first else "n"

    inputs = {i.name: (Shard(dim),) for i in program.inputs if i.role == "input"}
    return hand_plan(program, mesh, picked(program, mesh, pick), {}, inputs)
