"""Meshes and constraints: what is accepted, and errors that say what to write."""

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConfigurationError
from autopar.layout import Mesh, Shard
from autopar.planner.constraints import check_axes, parse_constraints


def test_constraints_name_parameters_and_axes() -> None:
    constraints = parse_constraints({"*.weight": {"tp": "S(0)"}})
    assert constraints.placements == {"*.weight": {"tp": Shard(0)}}
    check_axes(constraints, Mesh(("tp",), (2,)), ["a.weight"])
    with pytest.raises(ConfigurationError, match="names axis 'tp'"):
        check_axes(constraints, Mesh(("inner",), (2,)), ["a.weight"])
    with pytest.raises(ConfigurationError, match="matches no parameter"):
        check_axes(constraints, Mesh(("tp",), (2,)), ["bias"])


def test_an_unknown_constraint_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no_replicated_compute"):
        parse_constraints("fast")


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_a_batch_of_one_lets_operators_go(axis: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = autopar.plan(model, torch.randn(1, 6, 8), cluster="4 H100-SXM", dims={axis: 4}, loss_fn=squares)
    assert all(entry.axes != ("partial",) for name, entry in plan.operators.items() if "add" in name)
    assert plan.gap < 1e-9


def squares(output: torch.Tensor, batch: object) -> torch.Tensor:
    return output.pow(2).mean()
