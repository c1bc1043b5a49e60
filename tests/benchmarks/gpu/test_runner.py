"""A stage that raises, crashes, hangs or returns leaves a file that says so; a later call takes up what is missing."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.runner import FILES_PER_CALL, Call, ordered, run_call
from benchmarks.gpu.stage import Place, Row, Stage, attempted

TINY = Place(device=torch.device("cpu"), rehearse=True)
KEYS = {"measured", "stage", "what", "status", "rehearsal", "command", "commit", "device", "versions", "seconds",
        "limit_seconds", "verdicts", "rows"}  # fmt: skip


def two_rows(place: Place) -> Iterator[Row]:
    yield {"case": "rms_norm 8x8", "memory_share": 0.95}
    yield {"case": "gated 8x8", "memory_share": 0.5}


def raises(place: Place) -> Iterator[Row]:
    yield {"case": "first"}
    print("said before it fell")
    raise ValueError("planted")


def crashes(place: Place) -> Iterator[Row]:
    yield {"case": "first"}
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(place: Place) -> Iterator[Row]:
    yield {"case": "first"}
    time.sleep(60)


def has_an_error(place: Place) -> Iterator[Row]:
    yield attempted("one", lambda: {"value": 1 / 0})
    yield attempted("two", lambda: {"value": 2})


def says_nothing(place: Place) -> Iterator[Row]:
    yield from ()


def stage(run: object, *, seconds: float = 30.0, num_devices: int = 1) -> Stage:
    name = getattr(run, "__name__", "")
    return Stage(
        name=name, what=name, seconds=seconds, run=run, full={}, tiny={}, num_devices=num_devices  # type: ignore[arg-type]
    )  # fmt: skip


def results(folder: Path, *stages: Stage, resume: Sequence[Path] = (), seconds: float = 500.0) -> dict[str, Row]:
    call = Call(place=TINY, output=folder, resume=resume, seconds=seconds, command=["here"])
    run_call(call, stages, lambda line: None)
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def test_a_stage_that_returns_is_done_with_verdicts(tmp_path: Path) -> None:
    found = results(tmp_path, stage(two_rows))["two_rows"]
    assert found.keys() == KEYS
    assert found["status"] == "done"
    assert found["command"] == ["here"]
    assert found["device"]["kind"] == "cpu"
    assert found["versions"]["torch"] == torch.__version__
    verdict = {"goal": "bandwidth", "case": "rms_norm 8x8", "value": 0.95, "at_least": 0.9, "met": True}
    assert found["verdicts"] == [verdict]


@pytest.mark.parametrize(
    ("run", "ending", "said"),
    [
        (raises, "ended with exit code 1", "ValueError: planted"),
        (crashes, "ended by SIGSEGV", "Segmentation fault"),
        (hangs, "ended after 0.5 s", ""),
    ],
)
def test_a_stage_that_fails_keeps_its_rows_and_stops_no_other(
    run: object, ending: str, said: str, tmp_path: Path
) -> None:
    failing = stage(run, seconds=0.5 if run is hangs else 30.0)
    found = results(tmp_path, failing, stage(two_rows))
    assert found["two_rows"]["status"] == "done"
    failed = found[failing.name]
    assert (failed["status"], failed["ending"]) == ("failed", ending)
    assert failed["rows"] == [{"case": "first"}]
    assert said in "\n".join(failed["last_lines"])


def test_a_case_that_raises_fails_the_stage_and_not_the_cases_behind_it(tmp_path: Path) -> None:
    found = results(tmp_path, stage(has_an_error), stage(says_nothing))
    first, second = found["has_an_error"]["rows"]
    assert first["error"] == "ZeroDivisionError: division by zero"
    assert "1 / 0" in "\n".join(first["lines"])
    assert second == {"case": "two", "value": 2}
    assert found["has_an_error"]["status"] == found["says_nothing"]["status"] == "failed"


def test_what_is_done_is_left_out_and_what_failed_comes_last(tmp_path: Path) -> None:
    stages = [stage(has_an_error), stage(two_rows), stage(says_nothing)]
    results(tmp_path / "first", *stages[:2])
    assert [one.name for one in ordered(stages, [tmp_path / "first"], True)] == ["says_nothing", "has_an_error"]
    assert ordered(stages, [tmp_path / "first"], False) == stages  # a rehearsal has measured nothing
    again = results(tmp_path / "second", *stages, resume=[tmp_path / "first"])
    assert set(again) == {"says_nothing", "has_an_error"}
    mended = Stage(name="has_an_error", what="", seconds=9, run=two_rows, full={}, tiny={})
    results(tmp_path / "third", mended)
    calls = [tmp_path / "first", tmp_path / "third", tmp_path / "second"]
    assert [one.name for one in ordered(stages, calls, True)] == ["says_nothing"]


def test_no_stage_begins_that_may_outlast_the_call(tmp_path: Path) -> None:
    found = results(tmp_path, stage(two_rows, seconds=480), stage(has_an_error, seconds=20), seconds=100)
    assert set(found) == {"has_an_error"}


def test_a_call_on_a_gpu_leaves_no_more_files_than_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.runner.facts", lambda place: iter([MACHINE]))
    many = [Stage(name=f"stage-{at}", what="", seconds=9, run=two_rows, full={}, tiny={}) for at in range(10)]
    place = Place(device=torch.device("cpu"))
    call = Call(place=place, output=tmp_path, resume=[], seconds=500, command=[])
    lines: list[str] = []
    run_call(call, [stage(two_rows, num_devices=2), *many], lines.append)
    assert len(list(tmp_path.iterdir())) == FILES_PER_CALL == 8
    assert lines[0] == "two_rows: left, it needs 2 devices"
    assert lines[-1] == "stage-9: left, 8 files come back of a call"


MACHINE: Row = {"case": "machine", "device": {"kind": "cuda", "name": "X", "count": 1}, "versions": {}, "commit": None}
