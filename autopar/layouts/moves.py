"""Moves: in which order, and which of them together, the axes of a mesh change what they hold.

A placement is a number here: a factor of a dim from 0 on, REPLICATED, or below that a reduction that is still to come.

    (0, -1) -> (-1, 0)     slice axis 1?  no: axis 0 is in its way;  all_gather axis 0, then slice axis 1
    (0, 0) -> (1, 1)       one all_to_all over both axes
    (0, 0) -> (-1, 0)      all_gather over both axes (the inner blocks lie inside the outer ones), then slice axis 1

`REDISTRIBUTE` names the move of one axis. The first kind of `ORDER` with a legal move goes first, by as many axes as
make it together in one collective. Where none is legal, nested blocks are gathered out of the way. A pair of states
has up to three ways (`Way`), since not every state on the way is legal for every tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import Literal, NamedTuple, TypeAlias

StepKind: TypeAlias = Literal["slice", "reduce_scatter", "all_reduce", "all_to_all", "all_gather"]
State: TypeAlias = tuple[int, ...]
"""The number of the placement on every axis."""

REPLICATED = -1

REDISTRIBUTE: Mapping[tuple[str, str], StepKind] = {
    ("R", "S"): "slice",
    ("P", "S"): "reduce_scatter",
    ("P", "R"): "all_reduce",
    ("S", "S"): "all_to_all",
    ("S", "R"): "all_gather",
}
"""(what an axis holds, what it is to hold) -> how it gets there: replicated, a factor of a dim, a partial result."""
ORDER: tuple[StepKind, ...] = tuple(REDISTRIBUTE.values())
"""What makes blocks smaller goes before what moves them, and that before what makes them larger."""
BUFFER_BEHIND: frozenset[StepKind] = frozenset({"slice", "all_gather"})
"""What these make is their full buffer; that of the others is what they take."""


class Way(IntEnum):
    """The ways from one state to another, in the order in which they are tried until every state on one is legal."""

    WAITING = 0
    """An axis that is in another one's way waits in a spare factor."""
    STRAIGHT = 1
    OVER_COMMON = 2
    """Everything that changes is left first: always legal."""


class Move(NamedTuple):
    """What `axes`, ascending, do together."""

    kind: StepKind
    axes: tuple[int, ...]
    before: State
    after: State


Goals: TypeAlias = dict[int, tuple[StepKind, int]]
"""Axis -> how it moves next, and where to."""


def moves_on(
    way: Way, source: State, target: State, uneven: Collection[int] = (), spare: int | None = None
) -> tuple[Move, ...]:
    """The moves on one way to a reachable `target`. spare: where an axis may wait, for `Way.WAITING`."""
    if way == Way.OVER_COMMON:
        common = tuple([a if a == b else REPLICATED for a, b in zip(source, target, strict=True)])
        return (*find_moves(source, common, uneven), *find_moves(common, target, uneven))
    return find_moves(source, target, uneven, spare if way == Way.WAITING else None)


def find_moves(
    source: State, target: State, uneven: Collection[int] = (), spare: int | None = None
) -> tuple[Move, ...]:
    """The moves from `source` to a reachable `target`. Factors in `uneven` take no all_to_all.

    spare: a factor that neither end cuts and all axes divide; an axis that waits for an outer one waits there.
    """
    current = source
    waited: set[int] = set()
    moves: list[Move] = []
    while current != target:
        move = _next_move(current, target, uneven, spare)
        if spare is not None and spare not in current and move.kind != "slice":
            axis = _waiting_axis(move, target, uneven)
            if axis is not None and axis not in waited:
                waited.add(axis)
                move = Move(_kind(current[axis], spare), (axis,), current, _placed(current, {axis: spare}))
        moves.append(move)
        current = move.after
    return tuple(moves)


def _letter(placement: int) -> str:
    if placement >= 0:
        return "S"
    return "R" if placement == REPLICATED else "P"


def _kind(now: int, goal: int) -> StepKind:
    return REDISTRIBUTE[_letter(now), _letter(goal)]


def _placed(state: State, goals: dict[int, int]) -> State:
    return tuple([goals.get(axis, now) for axis, now in enumerate(state)])


def _waiting_axis(move: Move, target: State, uneven: Collection[int]) -> int | None:
    """The axis that should wait in the spare factor before a move: one that holds everything because an outer axis is
    to enter its block first (that then moves less), else one that would be gathered out of another's way. Where its
    goal is uneven only a gather leads out of the spare factor, so it does not wait."""
    current = move.before
    for axis, (now, goal) in enumerate(zip(current, target, strict=True)):
        if now == REPLICATED and goal >= 0 and goal not in uneven and goal not in current[axis + 1 :]:
            return axis
    inner = move.axes[-1]
    now, goal = current[inner], target[inner]
    gathered_aside = move.kind == "all_gather" and now >= 0 and goal >= 0 and now not in uneven and goal not in uneven
    return inner if gathered_aside else None


def _next_move(current: State, target: State, uneven: Collection[int], spare: int | None) -> Move:
    """The first kind of `ORDER` with a legal move, by as many axes as make it together in one collective."""
    goals: Goals = {}
    for axis, (now, goal) in enumerate(zip(current, target, strict=True)):
        if now != goal:
            kind = _kind(now, goal)
            if kind == "all_to_all" and (now in uneven or goal in uneven):
                kind, goal = "all_gather", REPLICATED
            goals[axis] = kind, goal
    kinds = {kind for kind, _ in goals.values()}
    for kind in ORDER:
        if kind in kinds:
            able = [axis for axis, (its, _) in goals.items() if its == kind]
            able.reverse()
            for count in range(len(able), 0, -1):
                for axes in itertools.combinations(able, count):
                    after = _placed(current, {axis: goals[axis][1] for axis in axes})
                    if _move_together(kind, axes[::-1], current, after, target):
                        return Move(kind, axes[::-1], current, after)
    return _unblock(goals, current, spare)


def _move_together(kind: StepKind, axes: Sequence[int], current: State, after: State, target: State) -> bool:
    """Whether one collective takes ascending `axes` from `current` to `after`.

    They leave their factors from the innermost outwards, then enter the new ones from the outermost inwards. Reductions
    have one operation. An all_to_all hands pieces of one block around, so what it cuts is not what it joins.
    """
    left = {current[axis] for axis in axes}
    if kind in ("all_reduce", "reduce_scatter") and len(left) > 1:
        return False
    if kind == "all_to_all" and any(after[axis] in left for axis in axes):
        return False
    state = list(current)
    for axis in reversed(axes):
        if not _may_leave(axis, state):
            return False
        state[axis] = REPLICATED
    for axis in axes:
        if not _may_enter(axis, after[axis], state, target):
            return False
        state[axis] = after[axis]
    return True


def _may_leave(axis: int, current: Sequence[int]) -> bool:
    """Blocks nest: an axis leaves a factor only while it is the innermost axis there."""
    now = current[axis]
    return now < 0 or now not in current[axis + 1 :]


def _may_enter(axis: int, goal: int, current: Sequence[int], target: State) -> bool:
    """An axis enters a factor only as its innermost axis, and only when the outer ones that belong there are there."""
    if goal < 0:
        return True
    if goal in current[axis + 1 :]:
        return False
    return all((current[outer] == goal) == (target[outer] == goal) for outer in range(axis))


def _unblock(goals: Goals, current: State, spare: int | None) -> Move:
    """No move is legal: gather the innermost axis of a factor that some blocked axis wants to leave or enter. Who waits
    in the spare factor is in nobody's way."""
    wanted = ({current[axis] for axis in goals} | {goal for _, goal in goals.values()}) - {spare}
    inner = max(axis for axis, now in enumerate(current) if now >= 0 and now in wanted)
    together = [
        axis
        for axis, now in enumerate(current)
        if now == current[inner] and (axis == inner or (axis in goals and axis < inner))
    ]
    # axes between a leaving outer axis and the innermost one must leave with it, so that the blocks stay contiguous
    if len(together) > 1:
        together = [a for a, now in enumerate(current) if now == current[inner] and a >= together[0]]
    return Move("all_gather", tuple(together), current, _placed(current, dict.fromkeys(together, REPLICATED)))
