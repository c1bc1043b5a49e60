"""Every family of schedules trains a tied GPT-2 of eight blocks on four ranks as one device does."""

from __future__ import annotations

import functools

import pytest

from autopar.parallel_plan import Plan
from autopar.program import MicroProgram
from autopar.schedules.list_scheduler import FAMILIES
from tests.distributed.pipeline_models import CASES
from tests.distributed.pipeline_plans import plan_of_stages, with_stages
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.pipeline_jobs"
RANKS, MICRO_BATCHES = 4, 4
SLOW = frozenset({"gpipe", "interleaved", "zb-h2", "v-half"})
"""Families that differ from a tested one in their numbers only."""
ONE_DEVICE = [name for name, policy in FAMILIES.items() if policy.order != "delayed" and policy.fill == "greedy"]


@functools.lru_cache
def _one_stage() -> tuple[MicroProgram, Plan]:
    case = CASES["deep"]
    return plan_of_stages(case.model(), case.batch(0), MICRO_BATCHES, {"tp": 1})


def _plan(family: str) -> bytes:
    case, chunks = CASES["deep"], FAMILIES[family].chunks[0]
    plan = with_stages(*_one_stage(), case.eighths if chunks == 2 else case.quarters, family, chunks)
    assert plan.mesh.shape == (RANKS, 1)
    return plan.to_json()


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in ONE_DEVICE]
)
def test_a_family_gives_the_loss_and_the_gradients_of_one_device(pool: Pool, family: str) -> None:
    for (errors,) in pool.run(f"{JOBS}:train", name="deep", plans=[_plan(family)]):
        assert max(errors.values()) <= 1e-5, errors


def test_steps_that_do_not_drain_train_as_delayed_sgd(pool: Pool) -> None:
    """PipeDream-2BW: gradients at the weights before the last step, up to three backwards left to the next one."""
    for error in pool.run(f"{JOBS}:delayed_steps", name="deep", plan=_plan("2bw")):
        assert error <= 1e-5
