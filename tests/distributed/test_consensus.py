"""Ranks that disagree say so, all of them, and nobody waits."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool, WorkerError, forked

pytestmark = pytest.mark.distributed


def test_a_rank_with_another_graph_is_named(pool: Pool) -> None:
    for message in pool.run("tests.distributed.training_jobs:different_models"):
        assert "ranks 2 captured another graph" in message


def test_an_error_on_one_rank_is_raised_on_all(pool: Pool) -> None:
    messages = pool.run("tests.distributed.training_jobs:failing_rank")
    assert messages[1].startswith("CaptureError")
    for rank in (0, 2, 3):
        assert messages[rank].startswith("RankMismatchError: rank 1 failed")


@pytest.mark.parametrize(("rank", "alone"), [(1, False), (0, True)])
def test_a_fault_of_ours_on_one_rank_ends_all(pool: Pool, rank: int, alone: bool) -> None:
    messages = pool.run("tests.distributed.training_jobs:fault_on", rank=rank, alone=alone)
    assert messages.pop(rank) == "TypeError: planted"
    assert all(m.startswith(f"RankMismatchError: rank {rank} failed") and "planted" in m for m in messages)


def test_another_order_of_collectives_on_one_rank_is_an_error_on_all(pool: Pool) -> None:
    messages = pool.run("tests.distributed.training_jobs:other_order")
    assert len(set(messages)) == 1
    assert "collective 0 of rank (0,) is" in messages[0]


@pytest.mark.exhaustive(sample="0.0-{'dp_shard': 4}")
@pytest.mark.parametrize("dims", [None, {"dp_shard": 4}, {"dp_shard": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_verify_passes_and_leaves_no_trace(pool: Pool, dims: dict[str, int] | None, dropout: float) -> None:
    assert max(pool.run("tests.distributed.training_jobs:verified", dims=dims, dropout=dropout)) <= 1e-5


@pytest.mark.exhaustive
def test_a_late_rank_is_killed_and_named() -> None:
    own, add = forked(2), "tests.distributed.pool_jobs:sum_of_ranks"
    try:
        assert own.run(add, world_size=2) == [1.0, 1.0], "both have started: what is late now sleeps"
        with pytest.raises(WorkerError, match=r"ranks \[1\] did not answer"):
            own.run("tests.distributed.pool_jobs:sleep_on_last_rank", world_size=2, timeout=8.0)
        assert own.run(add, world_size=2) == [1.0, 1.0]
    finally:
        own.close()


def test_the_traceback_of_a_worker_comes_back(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="planted"):
        pool.run("tests.distributed.pool_jobs:fail", world_size=1)


@pytest.mark.exhaustive(sample="no vocabulary mask-dims2")
@pytest.mark.parametrize(
    ("fault", "dims"),
    [
        ("maximum instead of sum", {"dp_replicate": 4}),
        ("maximum instead of sum", {"tp": 4}),
        ("no vocabulary mask", {"tp": 4}),
        ("no reduction in backward", {"dp_replicate": 4}),
        ("gather scaled by 1.0001", {"dp_shard": 4}),
    ],
)
def test_verify_catches_planted_faults(pool: Pool, fault: str, dims: dict[str, int]) -> None:
    for message in pool.run("tests.distributed.training_jobs:planted_fault", fault=fault, dims=dims):
        assert "allowed" in message
