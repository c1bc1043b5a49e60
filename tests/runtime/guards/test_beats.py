"""What a rank concludes from the beats of others: silence, ends, failures and differences, nothing from lateness."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from autopar.runtime.collectives.progress import Place
from autopar.runtime.guards.beats import Beat, Heard, judge, late, late_message, watched

LIMIT = 60.0
PERIOD = 5.0


def place(**changes: Any) -> Place:
    usual = Place(
        phase="call", number=12, entries=30, inside=True, seconds=3.0, station="", collective="all_reduce of w",
        failed=(0, ""),
    )  # fmt: skip
    return msgspec.structs.replace(usual, **changes)


def beat(count: int, *, ended: bool = False, **changes: Any) -> Beat:
    return Beat(count=count, place=place(**changes), host="node-3", process=4711, ended=ended)


def after(seconds: float, said: Beat, mine: Place, *, beats: bool) -> Heard:
    """What was heard of a rank that said this, and then beats at this place for so long, or is silent."""
    heard = Heard()
    for turn in range(int(seconds / PERIOD) + 1):
        heard.hear(msgspec.structs.replace(said, count=said.count + turn) if beats else said, PERIOD)
        heard.compare(mine, PERIOD)
    return heard


def test_a_silent_rank_is_named_with_its_place() -> None:
    heard = {1: after(60.0, beat(7), place(), beats=False)}
    verdict = judge(0, place(seconds=63.0), heard, LIMIT)
    assert verdict is not None
    assert verdict.lost
    assert verdict.message.startswith(
        "rank 1 is silent for 60 s (process 4711 on node-3): it was in call 12 for 3 s, last in all_reduce of w; "
        "rank 0 is in call 12 for 63 s"
    )
    assert judge(0, place(), {1: after(55.0, beat(7), place(), beats=False)}, LIMIT) is None


def test_silence_counts_where_nobody_waits_too() -> None:
    own_code = place(inside=False)
    assert judge(0, own_code, {1: after(60.0, beat(7), own_code, beats=False)}, LIMIT) is not None


@pytest.mark.parametrize("phase", ["compile", "call", "save"])
def test_a_rank_that_beats_may_be_late_for_hours(phase: str) -> None:
    mine = place(phase=phase, entries=31, seconds=7200.0)
    assert judge(0, mine, {1: after(7200.0, beat(7), mine, beats=True)}, LIMIT) is None
    both = place(phase=phase, seconds=7200.0)
    assert judge(0, both, {1: after(7200.0, beat(7, phase=phase), both, beats=True)}, LIMIT) is None


def test_a_rank_that_ended_is_missed_in_later_phases_only() -> None:
    last = beat(7, ended=True, inside=False)
    assert judge(0, place(inside=False), {1: after(600.0, last, place(), beats=False)}, LIMIT) is None
    assert judge(0, place(entries=30), {1: after(600.0, last, place(), beats=False)}, LIMIT) is None
    verdict = judge(0, place(entries=31), {1: after(60.0, last, place(), beats=False)}, LIMIT)
    assert verdict is not None
    assert verdict.message.startswith("rank 1 has ended (process 4711 on node-3): it was behind call 12")


def test_a_failure_ends_those_that_are_still_inside() -> None:
    failed = beat(7, inside=False, failed=(30, "KeyError: 'x'"))
    verdict = judge(0, place(), {1: after(10.0, failed, place(), beats=True)}, LIMIT)
    assert verdict is not None
    assert not verdict.lost
    assert verdict.message.startswith("rank 1 failed where rank 0 did not: KeyError: 'x'. Rank 0 is in call 12")
    assert judge(0, place(), {1: after(5.0, failed, place(), beats=True)}, LIMIT) is None
    assert judge(0, place(inside=False), {1: after(99.0, failed, place(inside=False), beats=True)}, LIMIT) is None
    assert judge(0, place(entries=31), {1: after(99.0, failed, place(entries=31), beats=True)}, LIMIT) is None


def test_two_phases_at_one_place_are_different_and_not_late() -> None:
    other = beat(7, phase="save")
    verdict = judge(0, place(), {1: after(60.0, other, place(), beats=True)}, LIMIT)
    assert verdict is not None
    assert not verdict.lost
    assert "rank 0 is in call 12 for 3 s, last in all_reduce of w, rank 1 is in save for 3 s" in verdict.message
    elsewhere = place(entries=31)
    assert judge(0, elsewhere, {1: after(600.0, other, elsewhere, beats=True)}, LIMIT) is None


def test_a_conflict_that_passes_is_none() -> None:
    heard = after(55.0, beat(7, phase="save"), place(), beats=True)
    heard.hear(beat(99, phase="save", entries=31), PERIOD)
    heard.compare(place(entries=31), PERIOD)
    assert judge(0, place(entries=31), {1: heard}, LIMIT) is None


def test_who_listens_to_a_silent_rank_listens_to_the_next_one_too() -> None:
    silent, fresh = after(35.0, beat(7), place(), beats=False), after(35.0, beat(7), place(), beats=True)
    ended = after(5.0, beat(7, ended=True), place(), beats=False)
    assert watched(0, 4, {}, LIMIT) == [1]
    assert watched(3, 4, {0: fresh}, LIMIT) == [0]
    assert watched(0, 4, {1: silent}, LIMIT) == [1, 2]
    assert watched(0, 4, {1: silent, 2: ended}, LIMIT) == [1, 2, 3]
    assert watched(0, 4, {1: silent, 2: silent, 3: silent}, LIMIT) == [1, 2, 3]


def test_ranks_of_one_host_are_named_together() -> None:
    heard = {r: after(60.0 - PERIOD * r, beat(7), place(), beats=False) for r in (1, 2)}
    heard[1] = after(60.0, beat(7), place(), beats=False)
    verdict = judge(0, place(), heard, LIMIT)
    assert verdict is not None
    assert "rank 1 is silent for 60 s" in verdict.message
    assert "rank 2 is silent for 50 s" in verdict.message


def test_before_its_first_beat_a_rank_is_not_judged() -> None:
    heard = Heard()
    for _ in range(100):
        heard.hear(None, PERIOD)
        heard.compare(place(), PERIOD)
    assert judge(0, place(), {1: heard}, LIMIT) is None
    assert "rank 1 is not compiling yet" in late_message(place(), {1: heard}, [1])


def test_patience_is_that_of_the_phase() -> None:
    assert late(place(phase="compile"), LIMIT) > late(place(phase="call"), LIMIT) > LIMIT
    assert late(place(inside=False), LIMIT) == float("inf")
