"""Fewest reruns: every peak of the exact frontier of a small step can be had, mostly in the shortest time, and a plan
that says so holds what was counted."""

import numpy as np
import pytest

from autopar.planner.memory.rerun_program import fewest_reruns
from autopar.planner.memory.reruns import Reruns, Step, held_over_time, runs_of
from benchmarks.recomputation.frontier import frontier, random_step
from benchmarks.recomputation.heuristics import dtr
from benchmarks.recomputation.random_steps import excesses, excesses_of_net, planned

CHAIN = Step(
    seconds=[1.0] * 8,
    reads=[[], [0], [1], [2], [3], [2, 4], [1, 5], [0, 6]],
    makers=list(range(8)),
    value_bytes=[1.0] * 8,
    forward=4,
    repeatable=frozenset(range(4)),
)
"""Four operators, each of whose gradients reads what its operator read."""


def test_what_is_not_saved_runs_where_it_is_first_wanted_and_once_more_where_it_is_given_up():
    assert runs_of(CHAIN, Reruns({2: ()})) == ((5, 2),)
    assert runs_of(CHAIN, Reruns({1: (), 2: ()})) == ((5, 1), (5, 2))
    assert runs_of(CHAIN, Reruns({1: (6,), 2: ()})) == ((5, 1), (5, 2), (6, 1))
    assert runs_of(CHAIN, Reruns({3: (6,)})) == ((4, 3),)


def test_bytes_of_every_operator_are_those_of_the_copies_that_live():
    assert held_over_time(CHAIN, ()).tolist() == [1, 2, 3, 4, 5, 5, 4, 3]
    assert held_over_time(CHAIN, runs_of(CHAIN, Reruns({2: ()}))).tolist() == [1, 2, 3, 4, 4, 5, 4, 3]


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_fits_at_every_peak_of_the_frontier(seed):
    graph = random_step(seed)
    rows = excesses(graph, {"autopar": planned, "dtr": dtr})
    assert all(row["autopar"] is not None and row["autopar"] >= -1e-9 for row in rows)
    assert np.median([row["autopar"] for row in rows]) < 0.05
    assert max(row["autopar"] for row in rows) < 0.4


def test_the_frontier_of_a_chain_is_the_known_one():
    graph = random_step(0)
    peaks, seconds = zip(*frontier(graph), strict=True)
    assert peaks[0] <= graph.peak_bytes(graph.once)
    assert seconds[0] == 0.0
    assert list(peaks) == sorted(peaks, reverse=True)
    assert list(seconds) == sorted(seconds)


def test_what_must_not_run_again_does_not():
    fixed = Step(
        seconds=CHAIN.seconds, reads=CHAIN.reads, makers=CHAIN.makers, value_bytes=CHAIN.value_bytes, forward=4,
        repeatable=frozenset({2}),
    )  # fmt: skip
    assert fewest_reruns(fixed, np.full(8, 5.0), 1.0) == Reruns({}, 0.0, True)
    assert fewest_reruns(fixed, np.array([9, 9, 9, 9, 4, 9, 9, 9.0]), 1.0) == Reruns({2: ()}, 1.0, True)
    assert fewest_reruns(fixed, np.full(8, 4.0), 1.0) is None


def test_rooms_are_met_exactly():
    room = held_over_time(CHAIN, ())
    assert fewest_reruns(CHAIN, room, 1.0) == Reruns({}, 0.0, True)
    assert fewest_reruns(CHAIN, room - 0.5, 1.0) != Reruns({}, 0.0, True)


@pytest.mark.parametrize("seed", [2, 3])
def test_a_captured_net_is_planned_at_every_limit_of_its_frontier(seed):
    rows = excesses_of_net(seed)
    assert len(rows) > 1
    assert all(row["autopar"] == pytest.approx(0.0, abs=1e-9) for row in rows[:-1])
    assert rows[-1]["autopar"] is not None
    assert rows[-1]["autopar"] >= -1e-9


def test_what_is_saved_leaves_forward_its_room():
    room = np.array([9, 9, 9, 3, 9, 9, 9, 9.0])
    found = fewest_reruns(CHAIN, room, 1.0)
    assert found is not None
    assert found.seconds == 1.0
    assert set(found.anew) < {0, 1}
