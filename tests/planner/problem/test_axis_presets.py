"""Axis presets: they let go where they would leave nothing, and give way to what a user writes."""

import pytest
import torch
from torch import nn

import autopar
from autopar.layouts.placement import Replicate


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_a_batch_of_one_lets_operators_go(axis: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = autopar.plan(model, torch.randn(1, 6, 8), cluster="4 H100-SXM", dims={axis: 4}, loss_fn=squares)
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
    plan = autopar.plan(model, torch.randn(4, 8), cluster="4 cpu", mesh=(4, 1), loss_fn=squares)
    assert all(entry.axes[1] is None for entry in plan.operators.values())
    assert all(parameter.stored[1] == Replicate() == parameter.used[1] for parameter in plan.parameters.values())


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
        ShiftedLabels(), torch.zeros(2, 32, dtype=torch.long), cluster="4 cpu", dims={"cp": 4}, mode="fast"
    )
    moved = [entry.axes for name, entry in plan.operators.items() if "pad" in name or "slice" in name]
    assert moved == [(None,)] * 2
