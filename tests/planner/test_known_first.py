"""Pipelines are compared only where the best guess of one is below what is known."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autopar.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.parallel_plan import Plan
from autopar.plan_value import Prediction
from autopar.planner.known_first import KnownFirst
from autopar.planner.search import SEARCH
from autopar.planner.stages.free import FreePipelines
from autopar.planner.stages.promise import Guess
from tests.planner.problems import captured_mlp, free_query

QUERY = free_query(captured_mlp(batch=8, width=16), Cluster.parse("2x2 H100-SXM"))
PIPELINE_SECONDS, GUESS = 0.9, 1.0


class Pipelines:
    """Stands for `FreePipelines`: remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def before_fitting(self, free_seconds: float) -> float:
        self.asked.append("fitting")
        return PIPELINE_SECONDS

    def before_more_parts(self, plan: Plan | None) -> float:
        self.asked.append("parts")
        return PIPELINE_SECONDS

    def better_of(self, plan: Any) -> Any:
        self.asked.append("better")
        return plan


def known_first(pipelines: Pipelines, known_seconds: float, query: Any = QUERY) -> KnownFirst:
    return with_guess(KnownFirst(query, cast(FreePipelines, pipelines), lambda: known_seconds))


def with_guess(first: KnownFirst) -> KnownFirst:
    first._guesses = [Guess(groups=2, count=2, mesh=Mesh(("ranks",), (2,)), seconds=GUESS)]
    return first


def plan_of(step_seconds: float) -> Any:
    return SimpleNamespace(predicted=Prediction(step_seconds=step_seconds, peak_bytes=0.0))


@pytest.mark.parametrize(
    ("known", "expected"), [(0.95, math.inf), (1.05, PIPELINE_SECONDS), (math.inf, PIPELINE_SECONDS)]
)
def test_a_known_plan_below_the_guess_spares_the_pipelines(known: float, expected: float) -> None:
    pipelines = Pipelines()
    first = known_first(pipelines, known)
    assert first.before_fitting(1.1) == expected
    assert first.before_more_parts(plan_of(1.1)) == expected
    assert first.were_asked == bool(pipelines.asked) == math.isfinite(expected)


def nobody_asks() -> float:
    raise AssertionError("known plans were solved")


@pytest.mark.parametrize(("budget_bytes", "plain_seconds"), [(1e12, 10.0), (1e3, 1.1)])
def test_pipelines_that_look_far_faster_are_compared_without_known_plans(
    budget_bytes: float, plain_seconds: float
) -> None:
    """Where the model fills more than a node, it is enough that they look faster."""
    query = replace(QUERY, budget_bytes=budget_bytes)
    first = with_guess(KnownFirst(query, cast(FreePipelines, Pipelines()), nobody_asks))
    assert first.before_fitting(plain_seconds) == PIPELINE_SECONDS


@pytest.mark.parametrize(("budget_bytes", "plain_seconds"), [(1e12, 1.1), (1e3, 0.95)])
def test_known_plans_are_asked_where_pipelines_do_not_look_faster(budget_bytes: float, plain_seconds: float) -> None:
    query = replace(QUERY, budget_bytes=budget_bytes)
    first = with_guess(KnownFirst(query, cast(FreePipelines, Pipelines()), nobody_asks))
    with pytest.raises(AssertionError, match="known plans were solved"):
        first.before_fitting(plain_seconds)


def test_the_longest_search_compares_all_pipelines_whatever_is_guessed() -> None:
    pipelines = Pipelines()
    first = known_first(pipelines, 0.1, replace(QUERY, search=SEARCH["max"]))
    first.before_fitting(1.1)
    first.better_of(plan_of(0.1))
    assert pipelines.asked == ["fitting", "better"]


def test_a_plan_above_the_guess_is_compared_at_last() -> None:
    pipelines = Pipelines()
    known_first(pipelines, 2.0).better_of(plan_of(1.1))
    assert pipelines.asked == ["better"]


def test_the_guess_is_that_of_the_most_promising_pipeline() -> None:
    first = KnownFirst(QUERY, cast(FreePipelines, Pipelines()), lambda: 0.0)
    assert 0.0 < first._guess < math.inf
