"""Checkpoints that are written beside the training: what they hold, and what is left where something is killed."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.distributed.pool import Pool, WorkerError, forked

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.checkpointer_jobs:"


def test_a_run_goes_on_where_the_last_checkpoint_was_taken(pool: Pool, tmp_path: Path) -> None:
    for rank, found in enumerate(pool.run(JOBS + "goes_on", world_size=2, path=str(tmp_path / "run"))):
        assert found["nothing at first"]
        assert found["began"] == [False, True] * 3
        assert found["folders"] == ["latest.json", "step-00000004", "step-00000006"]
        assert all(found["same"]), found["same"]
        assert found["loader"] == {"part": rank, "position": 50 + rank}
        assert found["steps"] == (6, 6)
        assert found["left in memory"] == []


def test_a_writer_that_is_killed_leaves_the_checkpoint_before_and_is_replaced(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(JOBS + "outlives_its_writer", world_size=2, path=str(tmp_path / "run")):
        assert "the checkpoint of step 3 was not written" in found["heard"]
        assert "rank 1: the process that writes has ended" in found["heard"]
        assert (found["left"], found["then"]) == (2, 3)
        assert found["named in memory"] == []


def test_a_job_that_is_killed_in_a_save_goes_on_from_the_last_whole_one(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    workers = forked(2)
    try:
        with pytest.raises(WorkerError):
            workers.run(JOBS + "killed_in_a_save", world_size=2, path=path)
        assert _has_ended(int(Path(f"{path}-writers-0").read_text()))
        assert workers.run(JOBS + "resumed", world_size=2, path=path) == [1, 1]
    finally:
        workers.close()
        with suppress(ProcessLookupError):
            os.kill(int(Path(f"{path}-writers-1").read_text()), 9)


def _has_ended(process: int) -> bool:
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{process}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False

