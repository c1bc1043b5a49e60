"""Workers are forked from two templates, and have what these captured."""

from __future__ import annotations

import contextlib

import pytest

from tests.distributed.pool import Pool, WorkerError, forked

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.pool_jobs"


def test_ranks_have_what_was_captured_and_neighbours_another_hash_seed() -> None:
    with contextlib.closing(forked(3)) as own:
        first = own.run(f"{JOBS}:compiled", world_size=3, dims={"dp_shard": 3})
        again = own.run(f"{JOBS}:compiled", world_size=3, dims={"dp_replicate": 3})
    assert [captured for _, _, captured in (*first, *again)] == [0] * 6
    assert [process for process, _, _ in first] == [process for process, _, _ in again]  # nothing new: no fork
    hashes = [text for _, text, _ in first]
    assert hashes[0] == hashes[2] != hashes[1]


def test_a_worker_that_fell_is_forked_again() -> None:
    with contextlib.closing(forked(2)) as own:
        with pytest.raises(WorkerError, match="the worker process died"):
            own.run(f"{JOBS}:exit_on", world_size=2, timeout=30.0, rank=1)
        assert own.run(f"{JOBS}:sum_of_ranks", world_size=2) == [1.0, 1.0]


def test_what_cannot_be_prepared_is_told_with_its_traceback(pool: Pool) -> None:
    with pytest.raises(AssertionError, match="no case 'none'"):
        pool.run(f"{JOBS}:unprepared", world_size=1, name="none")
