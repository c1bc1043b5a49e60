"""Save under one plan and world size, go on under another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed


@pytest.mark.exhaustive(sample="before1-4-after1-2")
@pytest.mark.parametrize(
    ("before", "processes_before", "after", "processes_after"),
    [
        ({"dp_shard": 4}, 4, {"tp": 4}, 4),
        ({"tp": 4}, 4, {"dp_shard": 2}, 2),
        ({"dp_shard": 2, "tp": 2}, 4, None, 1),
        (None, 1, {"dp_shard": 2, "tp": 2}, 4),
    ],
)
def test_training_goes_on_under_another_plan(
    pool: Pool,
    tmp_path: Path,
    before: dict[str, int] | None,
    processes_before: int,
    after: dict[str, int] | None,
    processes_after: int,
) -> None:
    path = str(tmp_path / "checkpoint")
    jobs = "tests.distributed.checkpoint_jobs:"
    saved = pool.run(jobs + "save", world_size=processes_before, path=path, dims=before, dropout=0.2)
    loaded = pool.run(jobs + "load", world_size=processes_after, path=path, dims=after, dropout=0.2)
    assert loaded[0] == pytest.approx(saved[0], rel=1e-4)


def test_strided_layouts_survive_full_tensor_and_files(pool: Pool, tmp_path: Path) -> None:
    assert max(pool.run("tests.distributed.checkpoint_jobs:strided_round_trip", path=str(tmp_path / "w"))) == 0.0


def test_a_run_that_is_loaded_goes_on_bit_by_bit(pool: Pool, tmp_path: Path) -> None:
    job, path = "tests.distributed.checkpoint_jobs:resumed", str(tmp_path / "run")
    assert all(pool.run(job, world_size=2, path=path, dims={"dp_shard": 2}, dropout=0.2))


def test_what_one_rank_cannot_do_is_heard_on_all_and_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    for rank, heard in enumerate(
        pool.run("tests.distributed.checkpoint_jobs:refused", world_size=2, path=path, dims={"tp": 2})
    ):
        differs, full, guard, another, whole, damaged, after = heard
        assert "extra.rank of ranks 1 is not that of rank 0" in differs
        assert "cannot write" in full
        assert "rank 1" in full
        assert "not this one" in guard
        assert guard.startswith(("RankMismatchError", "ValueError")[rank])
        assert "optimizer: AdamW in the checkpoint, SGD here" in another
        assert whole == "whole"
        assert "is damaged, nothing was changed" in damaged
        assert after == "unchanged"


@pytest.mark.exhaustive(sample="autopar-fsdp2-torchtitan")
@pytest.mark.parametrize(
    ("writer", "reader", "form"), [("fsdp2", "autopar", "nested"), ("autopar", "fsdp2", "torchtitan")]
)
def test_dcp_checkpoints_go_from_fsdp2_to_a_plan_with_strided_blocks_and_back(
    pool: Pool, tmp_path: Path, writer: str, reader: str, form: str
) -> None:
    job, path = "tests.distributed.checkpoint_jobs:carried_over", str(tmp_path / "run")
    for before, after in pool.run(job, world_size=2, path=path, writer=writer, reader=reader, form=form):
        assert before > 0.1
        assert after == 0.0


def test_every_part_of_the_batch_has_its_loader_back(pool: Pool, tmp_path: Path) -> None:
    found = pool.run("tests.distributed.checkpoint_jobs:loaders", world_size=2, path=str(tmp_path / "run"))
    for rank, (state, heard) in enumerate(found):
        assert state == {"part": rank, "position": 4 + rank}
        assert "extra['loader'] is of 2 parts in the checkpoint, and the batch has 1 here" in heard
