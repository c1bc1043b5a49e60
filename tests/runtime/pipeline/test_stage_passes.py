"""A stage's passes, with calls that say what they were given."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from autopar.runtime.pipeline.pipeline_wires import Form
from autopar.runtime.pipeline.stage_passes import StageGraphs

HERE = torch.device("cpu")


RETURNED = {"forward": [7, 8], "first": [7, 8, 11], "inputs": [9, 10], "last": [5]}


class Calls:
    """The calls of graphs that are names. ran: name, part and names of the sizes of what each was given."""

    def __init__(self, count: int, draws: dict[str, int]) -> None:
        self.micro = SimpleNamespace(count=count, draws=draws)
        self.ran: list[tuple[str, int, list[int]]] = []

    def of(self, graph: str, part: int = 0, pieces: int = 1) -> Any:
        def call(values: list[torch.Tensor]) -> list[torch.Tensor]:
            self.ran.append((graph, part, [value.numel() for value in values]))
            values.clear()
            return [torch.ones(size) for size in RETURNED.get(graph, [])]

        return call


def stage(count: int = 1, draws: dict[str, int] | None = None) -> tuple[StageGraphs, Calls]:
    """x: 2 elements, the tangent 3, the weight 5, the gradient's total 6; sends 7, saves 8."""
    calls = Calls(count, draws or {})
    sizes = {"x": ("input", 2), "dy": ("tangent", 3), "weight": ("parameter", 5)}
    inputs = tuple(
        SimpleNamespace(name=name, role=role, shape=(size,), dtype=torch.float32)
        for name, (role, size) in sizes.items()
    )
    made = StageGraphs(
        lowered=cast(Any, SimpleNamespace(inputs=inputs)),
        forward=cast(Any, "forward"),
        backward=cast(Any, "backward"),
        totals=(0,),
        halves=cast(Any, SimpleNamespace(inputs="inputs", input_totals=(), weights="weights", weight_totals=(0,))),
        prepared=None,
        late=None,
        first=None,
        last=None,
        last_kind=None,
        ending=None,
        total_forms={0: Form((6,), torch.float32)},
        results=(),
        sent_forward=("y",),
        sent_backward=("dx",),
        gradients=("weight",),
        calls=cast(Any, calls),
    )
    return made, calls


FORWARD = ("forward", 0, [2, 5])


@pytest.mark.parametrize(
    ("kinds", "ran"),
    [
        ("F", [FORWARD]),
        ("FB", [FORWARD, FORWARD, ("backward", 0, [8, 3, 6])]),
        ("FIW", [FORWARD, FORWARD, ("inputs", 0, [8, 3]), ("weights", 0, [10, 6])]),
    ],
)
def test_a_rehearsal_runs_each_graph_of_its_kinds_with_what_a_step_gives_it(kinds: str, ran: list[Any]) -> None:
    made, calls = stage()
    made.rehearse({"weight": torch.ones(5)}, kinds, 1, HERE)
    assert calls.ran == ran


def test_where_parts_draw_each_is_rehearsed() -> None:
    made, calls = stage(3, {"dropout": 0})
    made.rehearse({}, "F", 1, HERE)
    assert [part for _, part, _ in calls.ran] == [0, 1, 2]


def test_what_the_first_part_gathers_and_the_last_one_sums_is_rehearsed_too() -> None:
    made, calls = stage(3)
    prepared = SimpleNamespace(count=1, of_forward=(0,), of_backward=(0,))
    graphs = {"first": "first", "last": "last", "prepared": prepared}
    replace(made, **cast(Any, graphs)).rehearse({"weight": torch.ones(5)}, "FB", 1, HERE)
    forward, gathered = ("forward", 0, [2, 5, 11]), ("first", 0, [2, 5])
    backward = ("backward", 0, [8, 3, 11, 6])
    last = [("forward", 2, [2, 5, 11]), ("last", 2, [8, 3, 11, 6])]
    assert calls.ran == [gathered, forward, forward, backward, *last]
