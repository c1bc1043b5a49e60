"""Traces of torch.profiler are cut to their last step and put on the clock of the predicted one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.cost_models.simulator import Action, simulate
from autopar.errors import ConfigurationError
from autopar.report.measured import MEASURED_PIDS, read_measured, write_side_by_side


def kineto(path: Path, rank: int, late: float) -> Path:
    """Two steps of 100 us, in each one kernel after 10 us and 64 bytes after 20; this rank is `late` us."""
    events: list[dict[str, object]] = [
        {"ph": "X", "cat": "python_function", "name": "f", "tid": 1, "ts": 0, "dur": 999}
    ]
    for step in range(2):
        at = 1000.0 + late + 100.0 * step
        events += [
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "tid": 1, "ts": at, "dur": 100.0},
            {"ph": "X", "cat": "kernel", "name": f"mm {step}", "tid": 7, "ts": at + 10.0, "dur": 5.0},
            {
                "ph": "i",
                "name": "[memory]",
                "tid": 0,
                "ts": at + 20.0,
                "args": {"Device Type": 0, "Total Allocated": 64},
            },
        ]
    path.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 5, "distributedInfo": {"rank": rank}}))
    return path


def test_both_steps_begin_at_zero_and_ranks_keep_their_distance(tmp_path: Path) -> None:
    files = [kineto(tmp_path / f"{rank}.json", rank, late=3.0 * rank) for rank in (0, 1)]
    write_side_by_side(tmp_path / "both.json", simulate([Action("mm", "compute", 8e-6)]), files)
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    spans = [(e["pid"], e["name"], round(e["ts"], 6), round(e["dur"], 6)) for e in events if e["ph"] == "X"]
    assert spans == [
        (0, "mm", 0.0, 8.0),
        (MEASURED_PIDS, "ProfilerStep#1", 0.0, 100.0), (MEASURED_PIDS, "mm 1", 10.0, 5.0),
        (MEASURED_PIDS + 1, "ProfilerStep#1", 3.0, 100.0), (MEASURED_PIDS + 1, "mm 1", 13.0, 5.0),
    ]  # fmt: skip
    names = {e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert {"predicted rank 0", "measured rank 1", "compute", "thread 0", "stream 1"} <= names
    assert [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == MEASURED_PIDS] == [64.0]


@pytest.mark.parametrize("content", ["{}", "[]", "no json", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X"}]}'])
def test_what_is_no_trace_of_the_profiler_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"t\.json is no trace of torch\.profiler"):
        read_measured(tmp_path / "t.json", 0)
    with pytest.raises(ConfigurationError, match="No such file"):
        read_measured(tmp_path / "missing.json", 0)


def test_times_without_a_base_are_taken_as_they_are(tmp_path: Path) -> None:
    path = kineto(tmp_path / "t.json", 0, 0.0)
    document = json.loads(path.read_text())
    del document["baseTimeNanoseconds"]
    path.write_text(json.dumps(document))
    assert read_measured(path, 0).begin == 1100.0
