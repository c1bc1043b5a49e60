"""Moves between placements on several axes: they arrive, waste no step, and never cost more than gathering all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence

import pytest

from autopar.layouts import moves
from autopar.layouts.moves import REPLICATED, Goals, Move, State, find_moves

SUM, OTHER_SUM, SPARE = -2, -3, 7
SIZES = {2: ((2, 2), (8, 2), (2, 8), (3, 5)), 3: ((2, 2, 2), (8, 2, 2), (2, 8, 2), (2, 2, 8), (2, 3, 4))}
RECEIVED = {"slice": 0, "all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
"""How many blocks of the larger of its two states a rank receives in one move, less its own part."""

MENUS = [(2, (SUM, OTHER_SUM, REPLICATED, 0, 1, 2)), (3, (SUM, REPLICATED, 0, 1))]
UNEVEN: tuple[tuple[int, ...], ...] = ((), (0,), (0, 1))


def pairs(num_axes: int, menu: Sequence[int]) -> Iterator[tuple[State, State]]:
    """Every pair of states of which the second can be reached: nothing becomes a reduction."""
    for source, target in itertools.product(itertools.product(menu, repeat=num_axes), repeat=2):
        if all(goal >= REPLICATED or goal == now for now, goal in zip(source, target, strict=True)):
            yield source, target


def block(state: State, sizes: Sequence[int]) -> float:
    return 1 / math.prod(size for held, size in zip(state, sizes, strict=True) if held >= 0)


def received(path: Sequence[Move], sizes: Sequence[int]) -> float:
    """What a rank receives on the way, as a part of the whole tensor."""
    total = 0.0
    for move in path:
        ranks = math.prod(sizes[axis] for axis in move.axes)
        largest = max(block(move.before, sizes), block(move.after, sizes))
        total += RECEIVED[move.kind] * largest * (ranks - 1) / ranks
    return total


def gathering_all(source: State, target: State, sizes: Sequence[int]) -> float:
    """Gather every factor, reduce what is no longer to be a reduction, cut."""
    total = 1 - block(source, sizes)
    for reduction in {now for now in source if now < REPLICATED}:
        axes = [axis for axis, now in enumerate(source) if now == reduction != target[axis]]
        ranks = math.prod(sizes[axis] for axis in axes)
        total += 2 * (ranks - 1) / ranks
    return total


def faults(num_axes: int, menu: Sequence[int], uneven: Collection[int], spare: int | None) -> Iterator[str]:
    """What is wrong with the moves of every pair."""
    for source, target in pairs(num_axes, menu):
        path = find_moves(source, target, uneven, spare)
        states = [source, *(move.after for move in path)]
        if states[-1] != target or states[:-1] != [move.before for move in path]:
            yield f"{source} -> {target} does not arrive: {states}"
        if len(set(states)) < len(states):
            yield f"{source} -> {target} comes back to where it was: {states}"
        if any(move.kind == "all_gather" and SPARE in [move.before[axis] for axis in move.axes] for move in path):
            yield f"{source} -> {target} waits for nothing: {states}"
        if any(move.kind == "all_to_all" and _cuts(move, uneven) for move in path):
            yield f"{source} -> {target} hands uneven blocks around: {states}"
        for sizes in SIZES[num_axes]:
            if received(path, sizes) > gathering_all(source, target, sizes) + 1e-12:
                yield f"{source} -> {target} on {sizes} receives more than by gathering all: {states}"


def _cuts(move: Move, factors: Collection[int]) -> bool:
    return any(state[axis] in factors for state in (move.before, move.after) for axis in move.axes)


@pytest.mark.parametrize("spare", [None, SPARE])
@pytest.mark.parametrize("uneven", UNEVEN, ids=str)
@pytest.mark.parametrize(("num_axes", "menu"), MENUS)
def test_every_pair_is_reached_without_waste(
    num_axes: int, menu: tuple[int, ...], uneven: tuple[int, ...], spare: int | None
) -> None:
    assert not list(faults(num_axes, menu, uneven, spare))


def test_an_axis_that_is_called_back_from_where_it_waits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    unblock = moves._unblock

    def careless(goals: Goals, current: State, spare: int | None) -> Move:
        return unblock(goals, current, None)

    monkeypatch.setattr(moves, "_unblock", careless)
    found = list(faults(3, MENUS[1][1], (), SPARE))
    assert any("waits for nothing" in fault for fault in found)
    assert any("comes back" in fault for fault in found)
    assert any("receives more" in fault for fault in found)


def test_uneven_blocks_that_are_handed_around_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    forgetful = moves._next_move
    monkeypatch.setattr(moves, "_next_move", lambda current, target, _, spare: forgetful(current, target, (), spare))
    assert any("hands uneven blocks" in fault for fault in faults(2, MENUS[0][1], (0,), None))


def test_waiting_pays_where_the_axes_are_large() -> None:
    """(0, R) -> (R, 0): the inner axis cuts another dim meanwhile, so that the outer one gathers less."""
    waiting, straight = (find_moves((0, REPLICATED), (REPLICATED, 0), spare=spare) for spare in (SPARE, None))
    assert [move.kind for move in waiting] == ["slice", "all_gather", "all_to_all"]
    assert [move.kind for move in straight] == ["all_gather", "slice"]
    assert received(waiting, (2, 2)) == received(straight, (2, 2))
    assert received(waiting, (8, 8)) < received(straight, (8, 8)) / 4 + 1e-12


def test_axes_of_one_factor_move_together() -> None:
    assert find_moves((0, 0), (1, 1)) == (Move("all_to_all", (0, 1), (0, 0), (1, 1)),)
    assert [(move.kind, move.axes) for move in find_moves((0, 0), (REPLICATED, 0))] == [
        ("all_gather", (0, 1)),
        ("slice", (1,)),
    ]
