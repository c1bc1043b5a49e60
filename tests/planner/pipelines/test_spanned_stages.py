"""Spans of blocks in the stages of a pipeline: what fits by them, what they hold, and what a plan says of them."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.capture import capture
from autopar.errors import ConfigurationError, InfeasibleError
from autopar.explain.stage_problem import stage_problem
from autopar.hardware.cluster import Cluster
from autopar.plans.rung_names import host_bytes
from autopar.program import Program
from tests.planner.pipelines.chains import ACTIVATION, PARTS, ROWS, STATES, WIDTH, batch, chain, most_passes, planned
from tests.planner.pipelines.rank_memory import held_peaks

ROUNDED = 1.001
"""The loss, and sums over a batch, are left out."""
MOST_ABOVE = 0.3
"""Of a peak, by which the played one may be above what is held: at one of seven activations."""


@functools.cache
def program() -> Program:
    """Of one micro-batch."""
    return capture(chain(), (torch.zeros(ROWS, WIDTH, dtype=torch.float64),))


@pytest.mark.exhaustive(sample="1f1b-9.0-7")
@pytest.mark.parametrize(
    ("schedule", "activations", "times"),
    [("1f1b", 40.0, 0), ("1f1b", 14.0, 1), ("1f1b", 9.0, 7), ("gpipe", 18.0, 3), ("interleaved", 14.0, 1)],
)
def test_stages_fit_by_spans_and_hold_what_is_said(schedule: str, activations: float, times: int) -> None:
    plan = planned(activations, schedule)
    assert most_passes(plan) == times
    assert any("recomputes: full" in note for note in plan.notes) == bool(times)
    held, said = max(held_peaks(program(), plan)) + STATES, plan.predicted.peak_bytes
    assert held <= ROUNDED * said
    assert said <= activations * ACTIVATION
    assert said <= (1.0 + MOST_ABOVE) * held


@pytest.mark.exhaustive(sample="6.5")
@pytest.mark.parametrize("activations", [12.5, 6.5])
def test_what_stages_save_waits_on_the_host_and_is_not_held(activations: float) -> None:
    plan = planned(activations, cluster="2 H100-SXM", offload="activations")
    assert most_passes(plan) == 0
    assert plan.saved_on_host
    assert plan.copy_ahead_bytes
    assert host_bytes(plan.predicted) == 16 * ACTIVATION
    held, said = max(held_peaks(program(), plan)) + STATES, plan.predicted.peak_bytes
    assert held <= ROUNDED * said
    assert said <= activations * ACTIVATION


def test_stages_keep_their_parameters() -> None:
    with pytest.raises(ConfigurationError, match="stages keep their parameters on the device"):
        planned(12.0, cluster="2 H100-SXM", offload="all")


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
    assert plan.origin is not None
    problem = stage_problem(plan.origin.source, plan)
    solved = problem.solved(plan, problem.recovered(plan).labels)
    played = problem.played(plan, solved, problem.modes(plan, solved))
    assert played.step_seconds == pytest.approx(plan.predicted.step_seconds)
    assert played.peak_bytes == pytest.approx(plan.predicted.peak_bytes)


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
