import json

import pytest

from autopar.cost_models.simulator import COMPUTE_STREAM, GALVATRON_OVERLAP, Action, Interference, simulate
from autopar.errors import ConfigurationError


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


def test_ranks_have_streams_of_their_own_and_wait_for_each_other() -> None:
    timeline = simulate([
        Action("forward", COMPUTE_STREAM, 2),
        Action("send", "to rank 1", 1, (0,), communication=True),
        Action("forward", COMPUTE_STREAM, 2, (1,), rank=1),
        Action("backward", COMPUTE_STREAM, 1, (0,)),
    ])  # fmt: skip
    assert timeline.start_seconds == (0, 2, 3, 2)
    assert timeline.ranks == [0, 1]
    assert timeline.bubble_rate == pytest.approx(1 - (3 + 2) / (2 * 5))


def test_communication_slows_the_computation_beside_it() -> None:
    """t = max(compute', communication'): 4 s of compute, of which 3 s stand beside the transfer at 1 / 1.25."""
    program = [Action("mm", COMPUTE_STREAM, 4), Action("gather", "dp", 3, communication=True)]
    alone = simulate(program)
    beside = simulate(program, Interference(compute=1.25))
    assert alone.end_seconds == (4, 3)
    assert beside.end_seconds == (pytest.approx(3 + (4 - 3 / 1.25)), 3)
    assert beside.compute_seconds == 4
    long = simulate([program[0], Action("gather", "dp", 30, communication=True)], GALVATRON_OVERLAP)
    assert long.end_seconds[0] == pytest.approx(4 * GALVATRON_OVERLAP.compute)
    both = simulate(program, Interference(compute=1.25, communication=2.0))
    assert both.end_seconds == (pytest.approx(5.0), pytest.approx(5.0 + 3 - 5 / 2))


def test_interference_stays_within_a_rank_and_within_a_kind() -> None:
    program = [
        Action("mm", COMPUTE_STREAM, 4),
        Action("gather", "dp", 3, rank=1, communication=True),
        Action("copy", "copy engine", 2),
        Action("reduce", "tp", 3, rank=1, communication=True),
    ]
    slowed = Interference(compute=2.0, communication=2.0)
    assert simulate(program, slowed).end_seconds == simulate(program).end_seconds


def test_without_interference_both_players_agree() -> None:
    program = [
        Action("a", COMPUTE_STREAM, 1.5),
        Action("empty", "tp", 0.0, (0,), communication=True),
        Action("b", "tp", 2.0, (0,), communication=True),
        Action("c", COMPUTE_STREAM, 1.0, (1,)),
        Action("d", COMPUTE_STREAM, 1.0, (2, 3)),
        Action("e", COMPUTE_STREAM, 0.5, (4,), rank=1),
    ]
    almost = Interference(compute=1.0 + 1e-12)
    assert simulate(program, almost).start_seconds == pytest.approx(simulate(program).start_seconds)
    assert simulate(program, almost).end_seconds == pytest.approx(simulate(program).end_seconds)


def test_nothing_runs_faster_beside_other_work() -> None:
    with pytest.raises(ConfigurationError, match="nothing runs faster"):
        Interference(compute=0.9)


def test_memory_over_time_and_its_peak() -> None:
    timeline = simulate([
        Action("f", COMPUTE_STREAM, 1, allocates=5, frees=2),
        Action("b", COMPUTE_STREAM, 1, allocates=4, frees=7),
        Action("other", COMPUTE_STREAM, 1, rank=1, allocates=100),
    ])  # fmt: skip
    assert timeline.memory_over_time(0) == [(0, 5), (1, 3), (1, 7), (2, 0)]
    assert (timeline.peak_bytes(0), timeline.peak_bytes(1), timeline.peak_bytes(2)) == (7, 100, 0)


def test_the_trace_has_a_process_per_rank_and_counts_memory(tmp_path) -> None:
    timeline = simulate([
        Action("f", COMPUTE_STREAM, 1e-6, allocates=5),
        Action("f", COMPUTE_STREAM, 1e-6, (0,), rank=1, frees=3),
    ])  # fmt: skip
    timeline.write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]
    assert [(e["pid"], e["tid"]) for e in events if e["ph"] == "X"] == [(0, 0), (1, 1)]
    counters = [(e["pid"], e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    assert counters == [(0, 0, 5), (1, pytest.approx(2), -3)]


@pytest.mark.parametrize("first", [0, 1])
def test_exposed_is_what_the_rank_with_most_of_it_waits(first: int) -> None:
    timeline = simulate([
        Action("gather", "dp", 3, communication=True, rank=first),
        Action("gather", "dp", 3, communication=True, rank=1 - first),
        Action("mm", COMPUTE_STREAM, 2, rank=1 - first),
    ])  # fmt: skip
    assert timeline.exposed_communication_seconds == 3
