"""What ranks keep in flight, counted on schedules, against what the families promise."""

from __future__ import annotations

import pytest

from autopar.planner.pipelines.in_flight import in_flight, most_kept
from autopar.schedules.list_scheduler import FAMILIES, TIMED_FAMILIES, build_schedule


def test_1f1b_keeps_the_ranks_that_are_left() -> None:
    assert in_flight("1f1b", 4, 8) == (4, 3, 2, 1)
    assert in_flight("1f1b", 4, 2) == (2, 2, 2, 1)


def test_gpipe_keeps_all_micro_batches() -> None:
    assert in_flight("gpipe", 3, 100) == (100, 100, 100)


def test_zb_h2_keeps_more_than_zb_h1() -> None:
    assert max(in_flight("zb-h1", 4, 16)) == 4
    assert max(in_flight("zb-h2", 4, 16)) == 7


@pytest.mark.parametrize(
    ("family", "num_ranks"),
    [
        (family, num_ranks)
        for family in sorted(set(FAMILIES) - TIMED_FAMILIES)
        for num_ranks in (1, 2, 4)
        if num_ranks % 2 == 0 or not FAMILIES[family].both_ways
    ],
)
def test_many_micro_batches_keep_what_a_few_rounds_keep(family: str, num_ranks: int) -> None:
    chunks = FAMILIES[family].chunks[-1]
    for micro_batches in (64, 65, 67):
        schedule = build_schedule(family, num_ranks, micro_batches, chunks)
        assert in_flight(family, num_ranks, micro_batches, chunks) == most_kept(schedule)


def test_a_v_keeps_half_or_a_third_and_both_directions_what_one_keeps() -> None:
    """Chunks: a whole stage has two in a V; v-half and v-min keep room for two more."""
    assert max(in_flight("zb-v", 6, 40, 2)) == 12
    assert max(in_flight("v-half", 6, 40, 2)) == 8
    assert max(in_flight("v-min", 6, 40, 2)) == 6
    assert in_flight("chimera", 6, 40) == (*in_flight("hanayo", 3, 20, 2), *reversed(in_flight("hanayo", 3, 20, 2)))
    assert in_flight("2bw", 4, 8) == (4, 3, 2, 1)
