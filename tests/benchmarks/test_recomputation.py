"""Checkmate's program finds what an enumeration of its schedules finds, on small random graphs."""

import itertools
import math

import numpy as np
import pytest

from benchmarks.recomputation.checkmate import checkmate
from benchmarks.recomputation.heuristics import dtr, square_root
from benchmarks.recomputation.step_graph import StepGraph


def random_graph(seed):
    """Five or six operators that read some before them."""
    random = np.random.default_rng(seed)
    size = int(random.integers(5, 7))
    reads = [tuple(sorted({k - 1, *random.integers(0, k, 2).tolist()})) if k else () for k in range(size)]
    return StepGraph(
        names=tuple(map(str, range(size))),
        seconds=tuple(map(float, random.integers(1, 9, size))),
        reads=tuple(reads),
        makers=tuple(range(size)),
        value_bytes=tuple(int(each) for each in random.integers(1, 6, size)),
        forward=size // 2,
    )


def enumerated(graph, budget):
    """Least seconds that run again, over every set that runs in every stage; what lives is freed as early as it can."""
    size, best = len(graph.names), math.inf
    choices = [
        [again for count in range(min(t, 3) + 1) for again in itertools.combinations(range(t), count)]
        for t in range(size)
    ]
    seconds = sum(graph.seconds)

    def extend(t, schedule, extra):
        nonlocal best
        if extra >= best:
            return
        if t == size:
            if graph.peak_bytes(schedule) <= budget:
                best = extra
            return
        for again in choices[t]:
            extend(t + 1, (*schedule, *again, t), extra + sum(graph.seconds[k] for k in again))

    extend(0, (), 0.0)
    assert best == math.inf or best < size * seconds
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_exact_program_is_an_enumeration(seed):
    graph = random_graph(seed)
    whole = graph.peak_bytes(graph.once)
    for budget in (whole, whole - 1, whole - 3):
        found = checkmate(graph, budget, 20.0)
        assert found.is_proven
        expected = enumerated(graph, budget)
        if found.schedule is None:
            assert expected == math.inf
        else:
            assert graph.peak_bytes(found.schedule) <= budget
            assert graph.extra_seconds(found.schedule) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(12))
def test_rules_run_what_they_read_and_stay_within_the_budget(seed):
    graph = random_graph(seed)
    whole = graph.peak_bytes(graph.once)
    assert graph.peak_bytes(square_root(graph)) > 0
    for budget in (whole, whole - 1):
        schedule = dtr(graph, budget)
        assert schedule is None or graph.peak_bytes(schedule) <= budget
