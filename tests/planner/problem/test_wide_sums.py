"""Which values keep their partial sums up to the cast to fp32."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from autopar.capture import capture
from autopar.planner.problem.factorisation import shape_of
from autopar.planner.problem.graph_operators import operators
from autopar.planner.problem.wide_sums import masters, values_summed_wide
from autopar.program import Program
from autopar.rules.engine import rule_for


class Positions(nn.Module):
    """A linear layer with a bias, and positions whose gradient is summed over the batch before it is scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(6, 8)
        self.linear = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x) + self.positions(torch.arange(6))
        return functional.mse_loss(self.second(torch.relu(hidden)), x)


def program(precision: str) -> Program:
    return capture(Positions(), (torch.randn(4, 6, 8),), precision=precision)


def summed_wide(found: Program) -> set[str]:
    """Operators whose result is summed wide; an activation is what has the batch of 4, flattened to 24 or not."""
    rules = {node: rule for node in operators(found) if (rule := rule_for(node)) is not None}
    values = values_summed_wide(found, rules, lambda value: bool({4, 24} & set(shape_of(*value))))
    return {str(node.meta["operator"]) for node, _ in values}


def test_sums_over_the_batch_stay_partial_until_they_are_wide() -> None:
    found = summed_wide(program("bf16"))
    for operator in ("second/mm#1/bwd", "second/sum#0/bwd", "positions/embedding_dense_backward#0/bwd"):
        assert operator in found
    assert any(name.startswith("/sum") for name in found), "the positions' gradient before it is scattered"
    assert "second/mm#0/bwd" not in found, "gradients of activations are no sums over the batch"


def test_without_casts_nothing_is_special() -> None:
    found = program("fp32")
    assert summed_wide(found) == set()
    assert masters(found) == set()


def test_every_cast_parameter_is_a_master() -> None:
    found = program("bf16")
    names = {node.meta["operator"] for node in masters(found)}
    assert names == {entry.name for entry in found.inputs if entry.role == "parameter"}
