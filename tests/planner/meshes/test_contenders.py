"""Pipelines are compared only where the best estimate of one is below what is known."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.meshes.baseline_plans import KnownPlans
from autopar.planner.meshes.contenders import Plain
from autopar.planner.one_mesh.query import Query
from autopar.planner.pipelines.free_pipelines import FreePipelines
from autopar.planner.pipelines.pipeline_estimates import PipelineEstimate
from autopar.planner.problem.search_limits import SEARCH
from autopar.plans.plan_value import Prediction
from tests.planner.problems import captured_mlp, free_query

QUERY = free_query(captured_mlp(batch=8, width=16), Cluster.parse("2x2 H100-SXM"))
PIPELINE_SECONDS, GUESS = 0.9, 1.0


class Compared(FreePipelines):
    """Pipelines of which every comparison takes `PIPELINE_SECONDS` and is remembered, with one estimate."""

    def __init__(self, query: Query, baseline_seconds: float | None) -> None:
        super().__init__(query, cast(KnownPlans, Baselines(baseline_seconds)), 0.0)
        self.asked: list[float] = []
        self._estimates = [PipelineEstimate(groups=2, count=2, mesh=Mesh(("ranks",), (2,)), seconds=GUESS)]

    def _compared_seconds(self, plain: Plain) -> float:
        self.asked.append(plain.seconds)
        return PIPELINE_SECONDS

    def _better_of(self, plan: Any) -> Any:
        self.asked.append(plan.predicted.step_seconds)
        return plan


class Baselines:
    """Baselines of which the shortest takes so long; None: nobody may ask."""

    def __init__(self, step_seconds: float | None) -> None:
        self._step_seconds = step_seconds

    @property
    def step_seconds(self) -> float:
        assert self._step_seconds is not None, "known plans were solved"
        return self._step_seconds


def plan_of(step_seconds: float) -> Any:
    return SimpleNamespace(predicted=Prediction(step_seconds=step_seconds, peak_bytes=0.0))


@pytest.mark.parametrize(
    ("known", "expected"), [(0.95, math.inf), (1.05, PIPELINE_SECONDS), (math.inf, PIPELINE_SECONDS)]
)
def test_a_known_plan_below_the_guess_spares_the_pipelines(known: float, expected: float) -> None:
    pipelines = Compared(QUERY, known)
    assert pipelines.step_before("fitting", Plain(seconds=1.1)) == expected
    assert pipelines.step_before("more parts", Plain(seconds=1.1)) == expected
    assert pipelines.is_settled == bool(pipelines.asked) == math.isfinite(expected)


def test_where_nothing_fits_in_one_part_no_pipeline_is_compared_for_more() -> None:
    pipelines = Compared(QUERY, None)
    assert pipelines.step_before("more parts", None) == math.inf
    assert (pipelines.asked, pipelines.is_settled) == ([], False)


@pytest.mark.parametrize(("plain_seconds", "is_compared"), [(1.1, False), (10.0, True)])
def test_before_finer_meshes_pipelines_must_look_far_faster(plain_seconds: float, is_compared: bool) -> None:
    recapture: Any = SimpleNamespace()
    pipelines = Compared(replace(QUERY, recapture=recapture), None)
    seconds = pipelines.step_before("finer meshes", Plain(seconds=plain_seconds))
    assert seconds == (PIPELINE_SECONDS if is_compared else math.inf)
    assert pipelines.is_settled == is_compared


@pytest.mark.parametrize(("budget_bytes", "plain_seconds"), [(1e12, 10.0), (1e3, 1.1)])
def test_pipelines_that_look_far_faster_are_compared_without_known_plans(
    budget_bytes: float, plain_seconds: float
) -> None:
    """Where the model fills more than a node, it is enough that they look faster."""
    pipelines = Compared(replace(QUERY, budget_bytes=budget_bytes), None)
    assert pipelines.step_before("fitting", Plain(seconds=plain_seconds)) == PIPELINE_SECONDS


@pytest.mark.parametrize(("budget_bytes", "plain_seconds"), [(1e12, 1.1), (1e3, 0.95)])
def test_known_plans_are_asked_where_pipelines_do_not_look_faster(budget_bytes: float, plain_seconds: float) -> None:
    pipelines = Compared(replace(QUERY, budget_bytes=budget_bytes), None)
    with pytest.raises(AssertionError, match="known plans were solved"):
        pipelines.step_before("fitting", Plain(seconds=plain_seconds))


@pytest.mark.parametrize(("played_seconds", "is_compared"), [(0.95, False), (1.05, True)])
def test_a_played_step_below_the_guess_spares_pipelines_without_known_plans(
    played_seconds: float, is_compared: bool
) -> None:
    pipelines = Compared(QUERY, 2.0 if is_compared else None)
    seconds = pipelines.step_before("fitting", Plain(seconds=played_seconds, is_played=True))
    assert seconds == (PIPELINE_SECONDS if is_compared else math.inf)


def test_the_longest_search_compares_all_pipelines_whatever_is_guessed() -> None:
    pipelines = Compared(replace(QUERY, search=SEARCH["max"]), 0.1)
    pipelines.step_before("fitting", Plain(seconds=1.1))
    pipelines.better_of(plan_of(0.1))
    assert pipelines.asked == [1.1, 0.1]


def test_a_plan_above_the_guess_is_compared_at_last() -> None:
    pipelines = Compared(QUERY, 2.0)
    pipelines.better_of(plan_of(1.1))
    assert pipelines.asked == [1.1]


def test_the_guess_is_that_of_the_most_promising_pipeline() -> None:
    pipelines = FreePipelines(QUERY, KnownPlans(QUERY, None, False), 0.0)
    assert 0.0 < pipelines._estimate < math.inf
