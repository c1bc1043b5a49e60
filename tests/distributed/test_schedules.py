"""Every family of schedules trains a tied GPT-2 of eight blocks on four ranks as one device does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.schedules.list_scheduler import FAMILIES, TIMED_FAMILIES, StageTimes, list_schedule
from tests.distributed.pipeline_models import CASES
from tests.distributed.pipeline_plans import plan_of_stages, with_stages
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.pipeline_jobs"
RANKS, MICRO_BATCHES = 4, 4
SLOW = frozenset({"gpipe", "interleaved", "zb-h2", "v-half"})
"""Families that differ from a tested one in their numbers only."""
DRAINING = [name for name, policy in FAMILIES.items() if policy.order != "delayed"]
TIMES = StageTimes(forward=(1.0, 1.2, 0.9, 1.4), backward=(1.1,) * 4, weight=(0.7,) * 4, send=(0.1, 0.3, 0.1))
"""Unequal ones, for the families whose order follows from times."""


def _plan(family: str) -> bytes:
    case, chunks = CASES["deep"], FAMILIES[family].chunks[0]
    blocks = case.eighths if chunks == 2 else case.quarters
    timed = family in TIMED_FAMILIES
    plan = with_stages(*plan_of_stages("deep", MICRO_BATCHES, {"tp": 1}), blocks, "1f1b" if timed else family, chunks)
    assert plan.mesh.shape == (RANKS, 1)
    if timed:
        assert plan.pipeline is not None
        built = list_schedule(FAMILIES[family], RANKS, MICRO_BATCHES, chunks, TIMES)
        plan = replace(plan, pipeline=replace(plan.pipeline, schedule=family, actions=tuple(str(built).splitlines())))
    return plan.to_json()


@pytest.mark.exhaustive(sample=["zb-h1", "v-min"])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in DRAINING]
)
def test_a_family_gives_the_loss_and_the_gradients_of_one_device(pool: Pool, family: str) -> None:
    for (errors,) in pool.run(f"{JOBS}:train", name="deep", plans=[_plan(family)]):
        assert max(errors.values()) <= 1e-5, errors


def test_steps_that_do_not_drain_train_as_delayed_sgd(pool: Pool) -> None:
    """PipeDream-2BW: gradients at the weights before the last step, up to three backwards left to the next one."""
    for error in pool.run(f"{JOBS}:delayed_steps", name="deep", plan=_plan("2bw")):
        assert error <= 1e-5
