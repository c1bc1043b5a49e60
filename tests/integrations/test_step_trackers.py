"""The numbers of a StepLog, as TensorBoard and Weights & Biases keep them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autopar
from autopar.runtime import step_log
from autopar.runtime.step_log import StepTracker
from tests.plans.test_plan_text import small_plan


def logged(folder: Path, tracker: StepTracker) -> list[float]:
    """The seconds of two steps, as the log has them."""
    path = folder / "run.jsonl"
    with autopar.StepLog(path, small_plan(), trackers=[tracker]) as log:
        for _ in range(2):
            with log.step():
                pass
    return [json.loads(line)["seconds"] for line in path.read_text().splitlines()]


def test_tensorboard_has_measured_beside_predicted(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'autopar[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from autopar.integrations.tensorboard import TensorBoard

    seconds = logged(tmp_path, TensorBoard(tmp_path / "board"))
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("seconds/measured")]
    assert found == [(step, pytest.approx(value)) for step, value in enumerate(seconds)]
    assert len(events.Scalars("peak_bytes/predicted")) == 2


def test_wandb_keeps_an_offline_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'autopar[wandb]'")
    from autopar.integrations.wandb import OfflineRun

    logged(tmp_path, OfflineRun(tmp_path / "runs"))
    (written,) = (tmp_path / "runs" / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"seconds/measured" in written.read_bytes()


def test_other_ranks_open_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def log(self, step: int, numbers: object) -> None:
            raise AssertionError(f"{numbers} of step {step}")

        close = log

    monkeypatch.setattr(step_log, "rank", lambda: 1)
    with autopar.StepLog(tmp_path / "run.jsonl", small_plan(), trackers=[Refusing()]) as log, log.step():
        pass
    assert list(tmp_path.iterdir()) == []
