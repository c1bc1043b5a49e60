"""A rank that stops for good ends the job, with its name and place on all others; a slow one does not."""

from __future__ import annotations

import re

import pytest

from tests.distributed.pool import Pool, WorkerError

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.heartbeat_jobs"
LIMIT = 3.0


@pytest.mark.exhaustive(sample="step")
@pytest.mark.parametrize(
    ("where", "rank", "world", "place"),
    [
        ("planning", 0, 2, "it was in compile for "),
        ("step", 2, 4, " call 2 for "),
        ("save", 1, 2, "it was in save for "),
    ],
)
def test_a_stopped_rank_is_named_with_its_place(pool: Pool, where: str, rank: int, world: int, place: str) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(f"{JOBS}:stopped", world_size=world, where=where, rank=rank, limit=LIMIT, timeout=60.0)
    text = str(caught.value)
    assert f"ranks [{rank}] did not answer" in text, text[-5000:]
    said = re.findall(rf"RankLostError: (rank {rank} is silent for 3 s \(process .*)", text)
    assert len(said) == world - 1, text
    assert all(place in one for one in said), said


@pytest.mark.exhaustive
def test_a_process_whose_program_does_not_come_back_ends(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="rank 0:\nthe worker process died"):
        pool.run(f"{JOBS}:stopped", world_size=2, where="own code", rank=1, limit=LIMIT, timeout=60.0)


@pytest.mark.exhaustive
def test_without_a_heartbeat_the_others_wait(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"ranks \[0, 1\] did not answer") as caught:
        pool.run(f"{JOBS}:stopped", world_size=2, where="step", rank=1, limit=0.0, timeout=10.0)
    assert caught.value.late


def test_a_slow_plan_is_waited_for(pool: Pool) -> None:
    assert len(set(pool.run(f"{JOBS}:slow", world_size=2, limit=2.0))) == 1


@pytest.mark.exhaustive(sample="failed-")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("failed", "rank 1 failed where rank 0 did not: KeyError: "),
        ("different", "ranks 0 and 1 do different things, and wait for each other: "),
    ],
)
def test_late_is_told_from_different(pool: Pool, kind: str, message: str) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(f"{JOBS}:apart", world_size=2, kind=kind, limit=LIMIT, timeout=60.0)
    assert f"RankMismatchError: {message}" in str(caught.value), str(caught.value)
