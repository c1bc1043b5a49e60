"""What a plan promises, on a model of real size: proven optimal, and no dearer than the baselines."""

from __future__ import annotations

import pytest

import autopar
from autopar.plans.plan_text import ROUNDING
from benchmarks.models import workload


@pytest.mark.slow
def test_gpt2_without_a_memory_limit_is_proven_optimal() -> None:
    model, inputs = workload("gpt2")
    plan = autopar.plan(model, inputs, cluster="8 H100-SXM", mesh=(2, 4), memory_limit="1000GiB")
    assert plan.bound_seconds <= plan.objective_seconds * (1 + 1e-12)
    assert plan.gap <= ROUNDING
    assert plan.statistics["strategies"] > 1000
    assert "strategies: " in plan.summary()
    known = [b.objective_seconds for b in plan.baselines if b.objective_seconds]
    assert len(known) >= 3  # those on (8) are plans on (2, 4) too
    assert plan.objective_seconds <= min(known) * (1 + ROUNDING)
