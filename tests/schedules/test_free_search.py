"""The free search: never worse than where it starts, within memory, equal to brute force, none below its bound."""

from __future__ import annotations

import itertools

import pytest

from autopar.errors import ConfigurationError
from autopar.schedules.actions import Schedule
from autopar.schedules.check import check_schedule
from autopar.schedules.free_search import length_of, search_schedule
from autopar.schedules.list_scheduler import StageTimes, build_schedule
from autopar.schedules.searched import PassMemory
from tests.schedules.test_list_scheduler import makespan, orders, runs


def _times(stages: int) -> StageTimes:
    return StageTimes(
        forward=(1.5,) + (1.0,) * (stages - 1),
        backward=(1.2,) * stages,
        weight=(0.7,) * stages,
        send=(0.25,) * (stages - 1),
    )


def test_two_stages_are_as_short_as_the_best_of_all_orders() -> None:
    times = _times(2)
    best = min(
        makespan(schedule, times)
        for pair in itertools.product(*(list(orders(stage, 2, True)) for stage in (0, 1)))
        if runs(schedule := Schedule(pair))
    )
    found = search_schedule(build_schedule("1f1b", 2, 2), times, effort=2.0)
    check_schedule(found.schedule)
    assert found.seconds == pytest.approx(best)
    assert found.bound_seconds <= best
    assert found.bound_seconds >= 0.99 * best
    assert makespan(found.schedule, times) == pytest.approx(found.seconds)


@pytest.mark.parametrize(("family", "chunks"), [("1f1b", 1), ("v-min", 2)])
def test_what_is_found_is_no_longer_than_the_family_and_keeps_the_memory(family: str, chunks: int) -> None:
    stages = 3 * chunks
    times, first = _times(stages), build_schedule(family, 3, 4, chunks)
    memory = PassMemory(saved=(1.0,) * stages, until_weight=(0.5,) * stages)
    limit = 3.0 * chunks
    found = search_schedule(first, times, memory, [limit] * 3, effort=1.0)
    check_schedule(found.schedule)
    assert found.bound_seconds <= found.seconds <= length_of(first, times)
    for actions in found.schedule.ranks:
        kept = itertools.accumulate({"F": 1.0, "I": -0.5, "W": -0.5, "B": -1.0}[action.kind] for action in actions)
        assert max(kept) <= limit


def test_a_mutated_limit_is_seen() -> None:
    """With memory for one micro-batch no rank has two, and the step is longer."""
    times, memory = _times(2), PassMemory(saved=(1.0, 1.0), until_weight=(1.0, 1.0))
    first = build_schedule("zb-h1", 2, 3)
    free = search_schedule(first, times, memory, [3.0, 3.0], effort=1.0)
    tight = search_schedule(first, times, memory, [1.0, 1.0], effort=1.0)
    assert tight.bound_seconds > free.seconds


def test_schedules_that_cannot_be_searched_for_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="next step"):
        search_schedule(build_schedule("2bw", 2, 3), _times(2))
    with pytest.raises(ConfigurationError, match="stands on ranks"):
        search_schedule(build_schedule("chimera", 2, 4), _times(2))
