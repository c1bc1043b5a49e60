"""Steps of a compiled module are logged beside their prediction."""

from __future__ import annotations

import json
from pathlib import Path

from tests.distributed.pool import Pool


def test_every_step_is_logged_once_with_its_waits(pool: Pool, tmp_path: Path) -> None:
    job = "tests.distributed.collective_jobs:logged_steps"
    for lines in pool.run(job, world_size=2, path=str(tmp_path / "run.jsonl")):
        steps = [json.loads(line) for line in lines]
        assert [step["step"] for step in steps] == [0, 1]
        for step in steps:
            assert 0.0 < step["exposed_communication_seconds"] < step["seconds"]
            assert step["peak_bytes"] > 0
            assert step["predicted"]["seconds"] > step["predicted"]["exposed_communication_seconds"] > 0.0
