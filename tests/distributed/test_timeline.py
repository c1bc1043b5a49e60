"""The simulated step of a plan and a measured one of two gloo processes stand in one trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_commands import autopar
from tests.cli.test_examples import CONFIG
from tests.distributed.pool import Pool

SIZES = ("--batch", "8", "--seq", "32")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_measured_step_stands_beside_the_simulated_one(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model, plan, both = f"hf:{tmp_path / 'config.json'}", str(tmp_path / "plan.json"), tmp_path / "both.json"
    made = autopar("plan", model, "--cluster", "2 cpu", "--dims", "tp=2", "--optimizer", "none", *SIZES, "-o", plan)
    assert made.returncode == 0, made.stderr
    job = "tests.distributed.timeline_jobs:profiled_step"
    files = pool.run(job, world_size=2, model=model, batch=8, seq=32, plan=plan, folder=str(tmp_path))
    measured = [word for file in files for word in ("--measured", file)]
    done = autopar("simulate", plan, "--trace", str(both), *measured)
    assert done.returncode == 0, done.stderr

    events = json.loads(both.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["measured rank 0", "measured rank 1", "predicted rank 0"]
    spans = {pid: [e for e in events if e["ph"] == "X" and e["pid"] == pid] for pid in names}
    for pid, name in names.items():
        assert 0.0 <= min(event["ts"] for event in spans[pid]) < 50_000.0, name
        assert any(event["ph"] == "C" and event["args"]["bytes"] > 0 for event in events if event["pid"] == pid), name
        tracks = {event["tid"] for event in events if event["name"] == "thread_name" and event["pid"] == pid}
        assert tracks == {event["tid"] for event in spans[pid]}, name
    products = [
        event for pid in names if "measured" in names[pid] for event in spans[pid] if event["name"] == "aten::mm"
    ]
    assert len(products) >= 2 * 6 * CONFIG["n_layer"]  # forward and backward of at least four products a layer


def test_a_measured_step_needs_a_file_for_both() -> None:
    done = autopar("simulate", "plan.json", "--measured", "rank0.json")
    assert done.returncode == 2
    assert "give --trace" in done.stderr
