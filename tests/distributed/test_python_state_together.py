"""Hooks on gradients from before compile run once per backward with the reduced gradient; ranks that change together
are captured together."""

from __future__ import annotations

import pytest

from tests.distributed.pipeline_models import CASES
from tests.distributed.pipeline_plans import pipeline_plan
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.state_jobs"


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradient_hooks_run_once_with_reduced_gradients(pool: Pool, micro_batches: int) -> None:
    for found in pool.run(f"{JOBS}:hooked", world_size=2, dims={"dp_shard": 2}, micro_batches=micro_batches):
        assert max(found["errors"]) < 1e-5
        assert found["calls"] == [True, True]


def test_without_carrying_hooks_over_gradients_differ(pool: Pool) -> None:
    for found in pool.run(f"{JOBS}:hooked", world_size=2, dims={"dp_shard": 2}, micro_batches=1, planted=True):
        assert found["errors"][0] > 1e-2
        assert found["calls"] == []


def test_hooks_of_stages_run_once_where_the_parameter_is(pool: Pool) -> None:
    plan = pipeline_plan("gpt2", CASES["gpt2"].halves, "1f1b", 2, {"dp_shard": 2}).to_json()
    for found in pool.run(f"{JOBS}:hooked_stages", name="gpt2", plan=plan):
        assert found["error"] < 1e-4
        assert found["most"] == 1
        assert found["ran"] == found["held"] > 0


def test_a_change_on_every_rank_is_followed(pool: Pool) -> None:
    for errors in pool.run(f"{JOBS}:other_activation", world_size=2, dims={"dp_shard": 2}):
        assert max(errors) < 1e-5
