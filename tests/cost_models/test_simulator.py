import json

import pytest

from autopar.cost_models.simulator import COMPUTE_STREAM, Action, simulate


def test_an_empty_program_takes_no_time() -> None:
    timeline = simulate([])
    assert (timeline.makespan_seconds, timeline.exposed_communication_seconds, timeline.busy_seconds) == (
        0,
        0,
        {},
    )


def test_independent_communication_hides_behind_compute() -> None:
    timeline = simulate([
        Action("mm1", COMPUTE_STREAM, 2),
        Action("gather", "dp", 3, (0,), communication=True),
        Action("mm2", COMPUTE_STREAM, 2),
        Action("mm3", COMPUTE_STREAM, 1, (1,)),
    ])  # fmt: skip
    # compute 0-2, gather 2-5, compute 2-4, then mm3 waits for the gather: 5-6
    assert timeline.start_seconds == (0, 2, 2, 5)
    assert timeline.makespan_seconds == 6
    assert timeline.busy_seconds == {COMPUTE_STREAM: 5, "dp": 3}
    assert timeline.exposed_communication_seconds == 1


def test_a_stream_runs_in_program_order() -> None:
    timeline = simulate([
        Action("a", COMPUTE_STREAM, 5),
        Action("late", "tp", 1, (0,), communication=True),
        Action("ready", "tp", 1, communication=True),
        Action("other_axis", "dp", 1, communication=True),
    ])  # fmt: skip
    assert timeline.start_seconds == (0, 5, 6, 0)
    assert timeline.makespan_seconds == 7
    assert timeline.exposed_communication_seconds == 2


def test_blocking_collectives_on_the_compute_stream_are_fully_exposed() -> None:
    timeline = simulate([
        Action("mm", COMPUTE_STREAM, 2),
        Action("all_reduce", COMPUTE_STREAM, 3, (0,), communication=True),
        Action("mm", COMPUTE_STREAM, 2),
    ])  # fmt: skip
    assert timeline.makespan_seconds == 7
    assert timeline.exposed_communication_seconds == 3


@pytest.mark.parametrize("needed", [0, 1, -1])
def test_a_dependency_on_itself_or_later_is_an_error(needed: int) -> None:
    with pytest.raises(ValueError, match="loop"):
        simulate([Action("loop", COMPUTE_STREAM, 1, (needed,))])


def test_the_chrome_trace_has_a_row_per_stream_in_microseconds(tmp_path) -> None:
    timeline = simulate([Action("mm", COMPUTE_STREAM, 2e-6), Action("ar", "tp", 3e-6, (0,), communication=True)])
    timeline.write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", COMPUTE_STREAM, "tp"]
    spans = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [("mm", 0, 0, pytest.approx(2)), ("ar", 1, pytest.approx(2), pytest.approx(3))]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
