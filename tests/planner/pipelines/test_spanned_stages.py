"""Spans of blocks in the stages of a pipeline: what fits by them, what they hold, and what a plan says of them."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

import autopar
from autopar.capture import capture
from autopar.errors import InfeasibleError
from autopar.explain.stage_problem import stage_problem
from autopar.hardware.cluster import Cluster
from autopar.planner.pipelines.choose_pipeline import Pipeline
from autopar.plans.parallel_plan import Plan
from autopar.plans.rung_names import host_bytes
from autopar.program import Program
from tests.planner.pipelines.chains import ACTIVATION, PARTS, ROWS, STATES, WIDTH, batch, chain, most_passes, planned
from tests.planner.pipelines.rank_memory import held_peaks

WITHIN = 0.02
"""Of what the graphs of a rank hold; the loss, and sums over a batch, are left out."""
ABOVE = 0.07
"""Where a stage saves all: its last block is said to hold the border that it leaves to the stage behind."""


@functools.cache
def program() -> Program:
    """Of one micro-batch."""
    return capture(chain(), (torch.zeros(ROWS, WIDTH, dtype=torch.float64),))


def played(plan: Plan) -> Pipeline:
    """The plan once more, of its own text."""
    assert plan.origin is not None
    problem = stage_problem(plan.origin.source, plan)
    solved = problem.solved(plan, problem.recovered(plan).labels)
    return problem.played(plan, solved, problem.modes(plan, solved))


def assert_said(plan: Plan, above: float = WITHIN) -> None:
    """Every rank holds what its stages are said to hold."""
    held = np.array(held_peaks(program(), plan)) + STATES
    said = np.array(played(plan).costs.peak_bytes)
    assert said.max() == pytest.approx(plan.predicted.peak_bytes)
    assert (said >= (1.0 - WITHIN) * held).all()
    assert (said <= (1.0 + above) * held).all()


@pytest.mark.exhaustive(sample="1f1b-6.5-6")
@pytest.mark.parametrize(
    ("schedule", "activations", "times"),
    [("1f1b", 40.0, 0), ("1f1b", 14.0, 1), ("1f1b", 6.5, 6), ("gpipe", 14.0, 2), ("interleaved", 14.0, 1)],
)
def test_stages_fit_by_spans_and_hold_what_is_said(schedule: str, activations: float, times: int) -> None:
    plan = planned(activations, schedule)
    assert most_passes(plan) == times
    assert any("recomputes: full" in note for note in plan.notes) == bool(times)
    assert plan.predicted.peak_bytes <= activations * ACTIVATION
    assert_said(plan, above=WITHIN if times else ABOVE)


@pytest.mark.exhaustive(sample="6.5")
@pytest.mark.parametrize("activations", [12.5, 6.5])
def test_what_stages_save_waits_on_the_host_and_is_not_held(activations: float) -> None:
    plan = planned(activations, cluster="2 H100-SXM", offload="activations")
    assert most_passes(plan) == 0
    assert plan.saved_on_host
    assert plan.copy_ahead_bytes
    assert host_bytes(plan.predicted) == 16 * ACTIVATION
    assert plan.predicted.peak_bytes <= activations * ACTIVATION
    assert_said(plan)


def test_stages_are_named_by_the_blocks_at_their_ends() -> None:
    stages = [note for note in planned(14.0).notes if note.startswith("stage ")]
    assert [note.split(":")[0] for note in stages] == [
        "stage 0 on group 0 (layers.0 .. layers.7)",
        "stage 1 on group 1 (layers.8 .. the model)",
    ]


def test_without_recomputation_there_are_no_spans() -> None:
    with pytest.raises(InfeasibleError, match="no pipeline of 2 groups"):
        planned(14.0, recompute="none")


def test_full_recomputation_takes_spans_where_they_hold_less() -> None:
    full, none = planned(1000.0, recompute="full"), planned(1000.0)
    assert most_passes(full) == 1
    assert full.predicted.peak_bytes < 0.7 * none.predicted.peak_bytes
    assert full.micro_batches == PARTS


@pytest.mark.parametrize("options", [{}, {"cluster": "2 H100-SXM", "offload": "activations"}], ids=["spans", "host"])
def test_a_plan_with_spans_is_played_again_as_it_was(options: dict[str, str]) -> None:
    plan = planned(9.0, **options)
    again = played(plan)
    assert again.step_seconds == pytest.approx(plan.predicted.step_seconds)
    assert again.peak_bytes == pytest.approx(plan.predicted.peak_bytes)


def test_the_memory_of_the_host_is_a_limit() -> None:
    cluster = Cluster.parse("2 H100-SXM")
    assert cluster.host is not None
    small = replace(cluster, host=replace(cluster.host, memory_bytes=ACTIVATION))
    plan = autopar.Planner(chain(), batch(), cluster=small).plan(
        dims={"pp": 2}, schedule="1f1b", micro_batches=PARTS, memory_limit=13 * ACTIVATION, mode="fast",
        offload="activations",
    )  # fmt: skip
    assert not plan.saved_on_host
    assert most_passes(plan) == 1
