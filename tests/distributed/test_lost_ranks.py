"""A rank that ends or does not come is named by all others, with the operator in which they wait."""

from __future__ import annotations

import time

import pytest

from tests.distributed.pool import Pool, WorkerError

JOBS = "tests.distributed.collective_jobs"


@pytest.mark.parametrize(
    ("check_calls", "where"), [(50, "all_gather of the backward pass of train call 2 of LossOf"), (0, " of body.")]
)
def test_a_rank_that_ends_in_a_step_is_named_by_every_other_one(pool: Pool, check_calls: int, where: str) -> None:
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool.run(f"{JOBS}:end_in_a_step", world_size=4, rank=2, check_calls=check_calls)
    assert time.monotonic() - begin < 60.0
    text = str(caught.value)
    assert "rank 2:\nthe worker process died" in text, text[-3000:]
    assert text.count("RankLostError: rank 2 ended: ") == 3
    assert where in text
    assert text.count("; last on rank ") >= 3
    assert text.count("the last collectives of this rank stand in ") == 3


@pytest.mark.exhaustive
def test_a_rank_that_does_not_come_is_named_with_the_operator(pool: Pool) -> None:
    told = pool.run(f"{JOBS}:come_late", world_size=3, rank=1, seconds=3.0)
    for rank in (0, 2):
        assert "rank 1 is late or its link stalls: " in told[rank]
        assert "all_gather of train call 2 of LossOf" in told[rank]
        assert f"over ranks 0, 1, 2 does not end on rank {rank}" in told[rank]
    assert "rank 1 came late, the others have given up: " in told[1]
