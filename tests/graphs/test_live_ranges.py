"""Bytes over time, against brute force."""

from __future__ import annotations

import random

import pytest

from autopar.graphs.live_ranges import LiveRange, bytes_over_time


@pytest.mark.parametrize("seed", range(20))
def test_bytes_over_time_are_those_of_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    ranges = []
    for i in range(draw.randint(1, 12)):
        first = draw.randint(0, 10)
        ranges.append(LiveRange(f"t{i}", draw.randint(0, 100), first, first + draw.randint(0, 6)))
    last = max(live.last_index for live in ranges)
    alive = [sum(r.bytes for r in ranges if r.first_index <= t <= r.last_index) for t in range(last + 1)]
    assert bytes_over_time(ranges).tolist() == alive


def test_nothing_alive_has_no_time() -> None:
    assert bytes_over_time([]).tolist() == []
