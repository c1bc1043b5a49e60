"""Spans of a stage: the fastest that fit beside what waits, by an enumeration of the test's own."""

import math
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest

from autopar.planner.memory.nested_spans import SLOTS
from autopar.planner.memory.stage_spans import fastest_in_stage, smallest_in_stage
from tests.planner.memory.test_nested_spans import chain_of


def enumerated(spans, seconds, room, in_flight, keeps_last):
    """The least seconds of all cuts and all trees inside of them, without slots."""
    size = len(seconds)

    @cache
    def again(first, end, left):
        best = sum(seconds[first:end]) if spans.saved[first, end] + spans.made[first, end] <= left else math.inf
        for cut in range(first + 1, end):
            behind = again(cut, end, left - spans.saved[first, cut])
            best = min(best, sum(seconds[first:cut]) + behind + again(first, cut, left))
        return best

    def of(starts):
        runs = list(pairwise((*starts, size)))
        saved = [spans.saved[run] + (spans.made[run] if keeps_last and run[1] == size else 0.0) for run in runs]
        waits, cost = (in_flight - 1) * sum(saved), 0.0
        for number, run in enumerate(runs):
            left = room - waits - sum(saved[:number])
            if keeps_last and run[1] == size:
                cost += 0.0 if saved[number] <= left else math.inf
            else:
                cost += again(*run, left)
        return cost

    return min(of((0, *rest)) for number in range(size) for rest in combinations(range(1, size), number))


@pytest.mark.parametrize("keeps_last", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_the_fastest_spans_are_those_of_an_enumeration(seed, keeps_last):
    random = np.random.default_rng(seed)
    size = int(random.integers(2, 8))
    spans = chain_of(*random.integers(1, 9, (2, size)))
    spans.saved[:, -1] = 3.0  # a stage hands on as well
    seconds = random.integers(1, 9, size).tolist()
    for in_flight, parts in ((1, 1), (2, 1), (3, 1), (4, 0.5), (2, 2)):
        room = SLOTS / parts  # whole bytes are whole slots, or halves of them
        found = fastest_in_stage(spans, seconds, room, in_flight, keeps_last=keeps_last)
        best = enumerated(spans, seconds, room, in_flight, keeps_last)
        assert (math.inf if found is None else found.seconds) == pytest.approx(best)


def equal_layers(count):
    spans = chain_of([1] * count, [0] * count)
    spans.saved[:, -1] = 1.0
    return spans


def test_the_more_micro_batches_wait_the_longer_are_the_spans():
    spans = equal_layers(16)
    cuts = {in_flight: smallest_in_stage(spans, in_flight, keeps_last=False) for in_flight in (1, 4, 16)}
    longest = {in_flight: max(end - start for start, end in pairwise((*cut, 16))) for in_flight, cut in cuts.items()}
    assert longest == {1: 5, 4: 8, 16: 16}


def test_borders_that_would_wait_are_made_again_instead():
    spans, seconds = equal_layers(16), [1.0] * 16
    alone = fastest_in_stage(spans, seconds, 10.0, 1, keeps_last=False)
    waiting = fastest_in_stage(spans, seconds, 17.0, 8, keeps_last=False)
    assert alone.seconds == 16.0
    assert not alone.anew
    assert waiting.starts == (0,)
    assert waiting.anew
    assert 16.0 < waiting.seconds <= 32.0
