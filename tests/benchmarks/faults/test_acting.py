"""What becomes of a process, seen from inside; and a sample of the benchmark's rows on this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.errors import ConfigurationError
from benchmarks.faults.acting import faults_of, observed
from benchmarks.faults.fault import Fault, Scene, Wrong
from benchmarks.faults.verdicts import judge

SAMPLE = (
    "arguments/dims-of-an-unknown-axis/alone",
    "arguments/memory-limit-in-words/alone",
    "arguments/typed-show-of-nothing/alone",
    "input_files/plan-NaN/alone",
    "input_files/show-nested-deeply/alone",
    "input_files/cluster-no-nodes/alone",
    "outputs/report-onto-a-device/alone",
    "outputs/export-onto-a-pipe/alone",
    "sizes/a-cluster-of-a-billion-nodes/alone",
    "trust/memory/alone",
    "state/optimizer-before/alone",
    "gradients/accumulated/alone",
)


def _raising(error: BaseException | None) -> Any:
    def run(scene: Scene) -> None:
        if error is not None:
            raise error

    return run


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (None, "returned"),
        (ConfigurationError("tp=3"), "raised ours"),
        (Wrong("8 % off"), "raised wrong"),
        (RuntimeError("modified"), "raised torch's"),
        (KeyError("x"), "raised other"),
        (SystemExit(3), "raised other"),
        (NotImplementedError("no sharding strategy"), "raised other"),
    ],
)
def test_errors_are_told_apart(error: BaseException | None, ending: str, tmp_path: Path) -> None:
    fault = Fault(name="made/up", point=1, does="it", run=_raising(error), right=True)
    end = observed(fault, fault.run, 0, tmp_path)
    assert end.ending == ending
    assert error is None or (type(error).__name__ in end.message and "test_acting.py" in end.place)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_rows_is_good(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    fault = faults_of([f"benchmarks.faults.{name.partition('/')[0]}"])[name]
    found = judge(fault, [observed(fault, fault.run, 0, tmp_path)])
    assert found.good, found
