"""Notes of expert parallelism: what an axis ep cannot split, with numbers, and what runs instead."""

from __future__ import annotations

import pytest

from autopar.hardware.cluster import Cluster
from autopar.planner.planning import make_plan
from autopar.program import Program
from autopar.request import Request
from tests.passes.kernels.test_dispatched_rows import captured
from tests.planner.problems import captured_mlp

GATHERED = "every rank keeps its rows and gathers the weights of all experts"


def notes(program: Program, ranks: int, ep: str | None) -> list[str]:
    capacity = 1.25 if ep == "capacity" else None
    request = Request(
        cluster=Cluster.parse(f"{ranks} cpu"), dims={"ep": ranks}, ep=ep, mode="fast", with_baselines=False,  # type: ignore[arg-type]
        expert_capacity=capacity,
    )  # fmt: skip
    return [note for note in make_plan(program, request).notes if "ep=" in note]


@pytest.mark.parametrize(
    ("experts", "ranks", "ep", "words"),
    [
        (6, 4, "dispatch", f"6 experts do not divide by ep=4 and are fewer than 16: rows do not travel; {GATHERED}"),
        (6, 4, None, f"6 experts do not divide by ep=4 and are fewer than 16: rows do not travel; {GATHERED}"),
        (6, 4, "masked", f"6 experts do not divide by ep=4 and are fewer than 16: experts are not split; {GATHERED}"),
        (5, 4, "capacity", "5 experts do not divide by ep=4 and are fewer than 16: rows do not travel, and none is "
                           f"dropped; {GATHERED}"),
        (9, 3, "dispatch", "the batch of 8 does not divide by ep=3: rows do not travel; products of experts run whole"),
        (9, 3, "gather", "the batch of 8 does not divide by ep=3: rows are not split; products of experts run whole"),
    ],
)
def test_what_cannot_run_is_named_with_what_does(experts: int, ranks: int, ep: str | None, words: str) -> None:
    assert notes(captured(experts, "even")[0], ranks, ep) == [words]


@pytest.mark.parametrize("ep", ["dispatch", "gather", "masked", "capacity", None])
def test_what_runs_as_asked_has_no_note(ep: str | None) -> None:
    assert notes(captured(18, "even")[0], 4, ep) == []


@pytest.mark.parametrize("ep", ["dispatch", None])
def test_a_model_without_experts_is_told_so(ep: str | None) -> None:
    (note,) = notes(captured_mlp(), 4, ep)
    assert note.startswith("ep=4: the program has no products of experts")
