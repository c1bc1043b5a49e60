"""Nested spans: the least seconds for given room, by a recursion of the test's own over all trees of cuts."""

import math
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from autopar.planner.memory.nested_spans import SLOTS, fastest_nested
from autopar.planner.memory.spans import SpanBytes


def chain_of(borders, insides):
    """Segments of which each hands one tensor on to the next one and keeps some bytes inside."""
    size = len(borders)
    saved, made = np.zeros((2, size + 1, size + 1))
    for first in range(size):
        for end in range(first + 1, size + 1):
            saved[first, end] = borders[end - 1] if end < size else 0.0
            made[first, end] = sum(insides[first:end]) + sum(borders[first : end - 1])
    return SpanBytes(saved=saved, made=made)


def enumerated(spans, seconds, room):
    """The least seconds, without slots."""
    size = len(seconds)

    @cache
    def again(first, end, left):
        whole = spans.saved[first, end] + spans.made[first, end]
        best = sum(seconds[first:end]) if whole <= left else math.inf
        for cut in range(first + 1, end):
            behind = again(cut, end, left - spans.saved[first, cut])
            best = min(best, sum(seconds[first:cut]) + behind + again(first, cut, left))
        return best

    @cache
    def forward(first, left):
        best = 0.0 if spans.saved[first, size] + spans.made[first, size] <= left else math.inf
        for cut in range(first + 1, size):
            best = min(best, forward(cut, left - spans.saved[first, cut]) + again(first, cut, left))
        return best

    return forward(0, room)


@pytest.mark.parametrize("seed", range(40))
def test_the_best_tree_is_that_of_an_enumeration(seed):
    random = np.random.default_rng(seed)
    size = int(random.integers(2, 10))
    spans = chain_of(*random.integers(1, 13, (2, size)))
    seconds = random.integers(1, 9, size).tolist()
    for parts in (1, 2, 3, 4, 6):
        room = SLOTS / parts  # whole bytes are whole slots
        found, best = fastest_nested(spans, seconds, room), enumerated(spans, seconds, room)
        assert (math.inf if found is None else found.seconds) == pytest.approx(best)


def test_equal_layers_take_what_revolve_takes():
    """Griewank and Walther, 2000: with c tensors and r passes of each layer, binomial(c + r, c) layers are reached."""
    layers, tensors = 10, 3
    spans = chain_of([1.0] * layers, [0.0] * layers)
    assert fastest_nested(spans, [1.0] * layers, tensors).seconds == enumerated(spans, [1.0] * layers, tensors)
    assert fastest_nested(spans, [1.0] * layers, layers).seconds == 0.0
    assert fastest_nested(spans, [1.0] * layers, 0.9) is None


def test_what_is_given_up_lies_inside_of_the_spans_that_forward_leaves():
    found = fastest_nested(chain_of([1.0] * 24, [0.0] * 24), [1.0] * 24, 6.0)
    assert found.anew
    bounds = [*found.starts, 24]
    for first, end in found.anew:
        assert any(low <= first < end <= high for low, high in pairwise(bounds))
