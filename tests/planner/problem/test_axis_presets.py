"""Axis presets: they let go where they would leave nothing, and give way to what a user writes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.layouts.placement import Mesh, Replicate
from autopar.planner.problem.axis_presets import allowed_choices, orders_offered
from autopar.planner.problem.strategies import AxisChoice


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_a_batch_of_one_lets_operators_go(axis: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = autopar.plan(model, torch.randn(1, 6, 8), cluster="4 H100-SXM", dims={axis: 4}, loss_fn=squares,
        with_baselines=False)
    assert all(entry.axes != ("partial",) for name, entry in plan.operators.items() if "add" in name)
    assert plan.gap < 1e-9


def squares(output: torch.Tensor, batch: object) -> torch.Tensor:
    return output.pow(2).mean()


def test_what_a_user_writes_takes_the_place_of_what_the_axis_asks() -> None:
    """tp stores matrices split and never gathers them; "R" is obeyed all the same, by the operator and the weight."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(4, 8)
    options = {"cluster": "4 H100-SXM", "dims": {"tp": 4}, "loss_fn": squares}
    preset = autopar.plan(model, x, **options)  # type: ignore[arg-type]
    asked = autopar.plan(model, x, constraints={"0.weight": "R", "2/mm#0": "R"}, **options)  # type: ignore[arg-type]
    assert str(preset.parameters["0.weight"].stored[0]) != "R"
    assert str(asked.parameters["0.weight"].stored[0]) == "R"
    assert str(asked.operators["2/mm#0"].outputs[0][0]) == "R"


def test_an_axis_of_one_device_splits_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = autopar.plan(model, torch.randn(4, 8), cluster="4 cpu", mesh=(4, 1), loss_fn=squares, with_baselines=False)
    assert all(entry.axes[1] is None for entry in plan.operators.values())
    assert all(parameter.stored[1] == Replicate() == parameter.used[1] for parameter in plan.parameters.values())


def test_rows_of_experts_travel_over_the_axis_ep_alone() -> None:
    """A product whose neighbours keep their rows would send more than its price says."""
    rows = AxisChoice("t", ("t", 0), 8, False, (), (), "batch")
    experts = AxisChoice("e", ("e", 0), 8, True, (), ())
    pair = AxisChoice("t+e", ("t", 0), 8, False, (), (), "batch", beside=(("e", 0), 8))
    every = [AxisChoice(None, None, 0, False, (), ()), rows, experts, pair]

    def offered(axis: str, size: int = 4, **asked: Any) -> list[str | None]:
        found = allowed_choices(every, axis, size, batch="batch", sequence="s", heavy=True, spread=False, **asked)
        return [choice.name for choice in found]

    assert [c.name for c in orders_offered(every, Mesh(("inner",), (4,)), 1)] == [None, "t", "e"]
    assert [c.name for c in orders_offered(every, Mesh(("dp_shard", "ep"), (2, 4)), 1)] == [None, "t", "e", "t+e"]
    assert [offered(axis) for axis in ("dp_shard", "cp", "ep")] == [["t"], [None, "e"], ["t+e", "t", "e"]]
    assert [offered("ep", experts=way) for way in ("dispatch", "gather", "masked")] == [["t+e"], ["t"], ["e"]]
    assert offered("ep", 3, experts="dispatch") == [None, "t", "e"], "a batch that does not divide lets go"
    every[3] = replace(pair, beside=(("e", 0), 6))
    assert offered("ep", experts="dispatch") == ["t"], "so do six experts over four ranks"


class ShiftedLabels(nn.Module):
    """A loss of labels that are moved by a place, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        labels = nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
        return nn.functional.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), labels.flatten())


def test_labels_that_move_by_a_place_stay_whole_over_cp() -> None:
    """Every rank has the ids: moving their rows between ranks would only cost."""
    plan = autopar.plan(
        ShiftedLabels(), torch.zeros(2, 32, dtype=torch.long), cluster="4 cpu", dims={"cp": 4}, mode="fast",
        with_baselines=False,
    )
    moved = [entry.axes for name, entry in plan.operators.items() if "pad" in name or "slice" in name]
    assert moved == [(None,)] * 2
