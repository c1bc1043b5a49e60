"""Micro-batches whose parameters are gathered, and gradients summed, once per step: loss and every gradient are those
of one device, in double precision."""

from __future__ import annotations

import pytest

from tests.distributed import once_jobs
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.once_jobs"
EXACT = 1e-11


def test_two_ranks_compute_what_one_does(pool: Pool) -> None:
    meshes = [{"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2}]
    for errors in pool.run(f"{JOBS}:train", world_size=2, meshes=meshes):
        assert max(errors.values()) < EXACT, errors


def test_four_ranks_compute_what_one_does(pool: Pool) -> None:
    for errors in pool.run(f"{JOBS}:train", world_size=4, meshes=[{"dp_replicate": 2, "dp_shard": 2}]):
        assert max(errors.values()) < EXACT, errors


@pytest.mark.parametrize(("mutation", "once"), [("stale weights", True), ("totals that nobody sums", False)])
def test_a_planted_fault_is_noticed(pool: Pool, mutation: str, once: bool) -> None:
    dims = {"dp_shard": 2} if once else {"dp_replicate": 2}
    for errors in pool.run(f"{JOBS}:train", world_size=2, meshes=[dims], mutation=mutation):
        assert errors[f"{dims} {once}"] > 1e-3, errors


def test_predicted_bytes_are_those_that_are_counted(pool: Pool) -> None:
    """Of the data-parallel plan; what gathers hold on CPUs beside is the same in both plans that gather."""
    each, _ = once_jobs.wide_plans({"dp_replicate": 2})
    for counted in pool.run(f"{JOBS}:counted_bytes", world_size=2, plans=[each.to_json()]):
        assert counted == pytest.approx([each.predicted.peak_bytes], rel=0.02)
    plans = once_jobs.wide_plans({"dp_shard": 2})
    predicted = [plan.predicted.peak_bytes for plan in plans]
    assert predicted[1] > 1.1 * predicted[0]
    for counted in pool.run(f"{JOBS}:counted_bytes", world_size=2, plans=[plan.to_json() for plan in plans]):
        beside = counted[0] - predicted[0]
        assert counted[1] - beside == pytest.approx(predicted[1], rel=0.02)
