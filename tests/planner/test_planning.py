"""What a plan promises, on a model of real size: proven optimal, and no dearer than the baselines."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.capture import capture
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.planner import planning
from autopar.plans.plan_text import ROUNDING
from autopar.request import Request
from benchmarks.models import workload
from tests.planner.problems import Mlp, captured_mlp


@pytest.mark.exhaustive
@pytest.mark.slow
def test_gpt2_without_a_memory_limit_is_proven_optimal() -> None:
    model, inputs = workload("gpt2")
    plan = autopar.plan(model, inputs, cluster="8 H100-SXM", mesh=(2, 4), memory_limit="1000GiB")
    assert plan.bound_seconds <= plan.objective_seconds * (1 + 1e-12)
    assert plan.gap <= ROUNDING
    assert plan.statistics["strategies"] > 1000
    assert "strategies: " in plan.summary(verbose=True)
    known = [b.objective_seconds for b in plan.baselines if b.objective_seconds]
    assert len(known) >= 3  # those on (8) are plans on (2, 4) too
    assert plan.objective_seconds <= min(known) * (1 + ROUNDING)


def test_a_pattern_that_matches_nothing_is_refused_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(asked: object) -> None:
        pytest.fail("the search has begun")

    monkeypatch.setattr(planning, "best_plan", search)
    request = Request(cluster=Cluster.parse("2 H100-SXM"), constraints={"nothing": {"recompute": "full"}})
    with pytest.raises(ConfigurationError, match=r"'nothing' .*matches no module or forward operator"):
        planning.make_plan(captured_mlp(), request)


def test_evaluation_takes_no_time_for_the_optimizer() -> None:
    inputs = torch.zeros(64, 64), torch.zeros(64, dtype=torch.long)
    request = Request(cluster=Cluster.parse("1 H100-SXM"), mode="fast")
    evaluated, trained = (
        planning.make_plan(capture(Mlp(), inputs, {}, training=training), request) for training in (False, True)
    )
    assert evaluated.predicted.step_seconds < trained.predicted.step_seconds


def test_a_plan_says_whether_its_optimizer_was_assumed_and_has_baselines_where_they_are_asked_for() -> None:
    cluster = Cluster.parse("2 H100-SXM")
    assumed = planning.make_plan(captured_mlp(), Request(cluster=cluster, mode="fast", with_baselines=True))
    given = planning.make_plan(
        captured_mlp(), Request(cluster=cluster, mode="fast", with_baselines=False, optimizer=torch.optim.SGD)
    )
    assert (assumed.question["optimizer_assumed"], given.question["optimizer_assumed"]) == (True, False)
    assert assumed.baselines
    assert not given.baselines
