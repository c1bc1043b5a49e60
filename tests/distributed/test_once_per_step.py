"""Micro-batches whose parameters are gathered, and gradients summed, once per step: loss and every gradient are those
of one device, in double precision."""

from __future__ import annotations

import pytest

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
