"""Redistribution: which collectives turn one layout into another. One table, two readers.

    (P(sum), R) -> (S(0), R)     reduce_scatter over axis 0
    (S(0), S(0)) -> (R, R)       one all_gather over both axes
    (S(0), S(0)) -> (S(1), S(1)) one all_to_all over both axes
    (S(0), S(0)) -> (R, S(0))    all_gather over both axes (the inner blocks lie inside the outer ones), then slice

`REDISTRIBUTE` names the move of one axis; `redistribution` orders the moves of all axes, merges equal moves into one
collective over several axes, and inserts the extra gathers that nested shards need. Cost models price exactly these
steps and the lowering emits exactly these steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

from autopar.layout import Layout, Partial, Placement, Replicate, Shard

StepKind: TypeAlias = Literal["slice", "reduce_scatter", "all_reduce", "all_to_all", "all_gather"]

REDISTRIBUTE: dict[tuple[type, type], StepKind] = {
    (Replicate, Shard): "slice",
    (Partial, Shard): "reduce_scatter",
    (Partial, Replicate): "all_reduce",
    (Shard, Shard): "all_to_all",
    (Shard, Replicate): "all_gather",
}
_ORDER: tuple[StepKind, ...] = ("slice", "reduce_scatter", "all_reduce", "all_to_all", "all_gather")


@dataclass(frozen=True, slots=True)
class Step:
    """One collective (or local slice) over `axes`, ascending; before and after are whole layouts.

    `local_fraction` is the part of the global tensor that a rank holds before the step.
    """

    kind: StepKind
    axes: tuple[int, ...]
    before: Layout
    after: Layout
    local_fraction: float

    @property
    def moved(self) -> set[Shard]:
        """The factors that an axis leaves or enters."""
        changed = (p for a, b in zip(self.before, self.after, strict=True) if a != b for p in (a, b))
        return {p for p in changed if isinstance(p, Shard)}

    @property
    def is_transposing(self) -> bool:
        """Whether the blocks that move are strided in memory: those of every dim but the first."""
        return bool(self.moved - {Shard(0)})

    def buffer_fraction(self, mesh_shape: Sequence[int]) -> float:
        """Part of the global tensor in the full logical buffer of the collective (gather output, reduce input)."""
        group = math.prod(mesh_shape[axis] for axis in self.axes)
        return self.local_fraction * group if self.kind == "all_gather" else self.local_fraction


def is_reachable(source: Layout, target: Layout) -> bool:
    """Nothing turns into a Partial; every other pair has a redistribution."""
    return all(a == b or not isinstance(b, Partial) for a, b in zip(source, target, strict=True))


@cache
def redistribution(
    source: Layout,
    target: Layout,
    mesh_shape: tuple[int, ...],
    uneven_dims: frozenset[int] = frozenset(),
    spare: Shard | None = None,
) -> tuple[Step, ...]:
    """The steps from `source` to `target`. Dims in `uneven_dims` do not divide, so they take no all_to_all.

    spare: a factor that neither layout cuts and all axes divide; an axis that waits for an outer one waits there.

    Raises ValueError for a target that cannot be reached (something else -> Partial).
    """
    if not is_reachable(source, target):
        raise ValueError(f"no redistribution from {source} to {target}: nothing turns into a Partial")
    current = source
    waited: set[int] = set()
    steps: list[Step] = []
    while current != target:
        kind, axes, after = _next_move(current, target, uneven_dims)
        axis = (
            None
            if spare in (None, *current) or kind == "slice"
            else _waiting_axis(kind, axes, current, target, uneven_dims)
        )
        if axis is not None and axis not in waited:
            waited.add(axis)
            kind = "slice" if isinstance(current[axis], Replicate) else "all_to_all"
            axes, after = (axis,), tuple(spare or p if a == axis else p for a, p in enumerate(current))
        steps.append(Step(kind, axes, current, after, _fraction(current, mesh_shape)))
        current = after
    return tuple(steps)


def _waiting_axis(
    kind: StepKind, axes: tuple[int, ...], current: Layout, target: Layout, uneven: frozenset[int]
) -> int | None:
    """The axis that should wait in the spare factor before `axes` move: one that holds everything because an outer
    axis is to enter its block first (that then moves less), else one that would be gathered out of another's way."""
    for axis, (now, goal) in enumerate(zip(current, target, strict=True)):
        if isinstance(now, Replicate) and isinstance(goal, Shard) and goal not in current[axis + 1 :]:
            return axis
    inner = max(axes)
    now, goal = current[inner], target[inner]
    gathered_aside = (
        kind == "all_gather" and isinstance(now, Shard) and now.dim not in uneven and isinstance(goal, Shard)
    )
    return inner if gathered_aside else None


def _fraction(layout: Layout, mesh_shape: Sequence[int]) -> float:
    return 1.0 / math.prod(mesh_shape[axis] for axis, p in enumerate(layout) if isinstance(p, Shard))


def _next_move(current: Layout, target: Layout, uneven: frozenset[int]) -> tuple[StepKind, tuple[int, ...], Layout]:
    """The first kind of `_ORDER` with a legal move, by as many axes as make it together in one collective."""
    moves: dict[int, tuple[StepKind, Placement]] = {}
    for axis, (now, goal) in enumerate(zip(current, target, strict=True)):
        if now != goal:
            kind = REDISTRIBUTE[type(now), type(goal)]
            if kind == "all_to_all" and {now.dim, goal.dim} & uneven:  # type: ignore[union-attr]
                kind, goal = "all_gather", Replicate()
            moves[axis] = (kind, goal)
    for kind in _ORDER:
        able = [axis for axis in reversed(range(len(current))) if axis in moves and moves[axis][0] == kind]
        for count in range(len(able), 0, -1):
            for axes in itertools.combinations(able, count):
                after = tuple(moves[axis][1] if axis in axes else now for axis, now in enumerate(current))
                if _move_together(kind, sorted(axes), current, after, target):
                    return kind, tuple(sorted(axes)), after
    return _unblock(moves, current, target)


def _is_legal(axis: int, goal: Placement, current: Sequence[Placement], target: Layout) -> bool:
    """Blocks nest: an axis leaves or enters a sharded factor only while it is its innermost axis."""
    now = current[axis]
    if isinstance(now, Shard) and any(other == now for other in current[axis + 1 :]):
        return False
    if not isinstance(goal, Shard):
        return True
    if any(other == goal for other in current[axis + 1 :]):
        return False
    return all((current[outer] == goal) == (target[outer] == goal) for outer in range(axis))


def _move_together(kind: StepKind, axes: list[int], current: Layout, after: Layout, target: Layout) -> bool:
    """Whether one collective takes ascending `axes` from `current` to `after`.

    They leave their factors from the innermost outwards, then enter the new ones from the outermost inwards. Reductions
    have one operation. An all_to_all hands pieces of one block around, so what it cuts is not what it joins.
    """
    left = {current[axis] for axis in axes}
    if kind in ("all_reduce", "reduce_scatter") and len(left) > 1:
        return False
    if kind == "all_to_all" and left & {after[axis] for axis in axes}:
        return False
    state = list(current)
    for axis in reversed(axes):
        if not _is_legal(axis, Replicate(), state, target):
            return False
        state[axis] = Replicate()
    for axis in axes:
        if not _is_legal(axis, after[axis], state, target):
            return False
        state[axis] = after[axis]
    return True


def _unblock(
    moves: dict[int, tuple[StepKind, Placement]], current: Layout, target: Layout
) -> tuple[StepKind, tuple[int, ...], Layout]:
    """No move is legal: gather the innermost axis of a factor that some blocked axis wants to leave or enter."""
    wanted = {current[axis] for axis in moves} | {moves[axis][1] for axis in moves}
    inner = max(axis for axis, now in enumerate(current) if isinstance(now, Shard) and now in wanted)
    together = [
        axis
        for axis, now in enumerate(current)
        if now == current[inner] and (axis == inner or (axis in moves and axis < inner))
    ]
    # axes between a leaving outer axis and the innermost one must leave with it, so that the blocks stay contiguous
    if len(together) > 1:
        together = [a for a, now in enumerate(current) if now == current[inner] and a >= min(together)]
    after = tuple(Replicate() if axis in together else now for axis, now in enumerate(current))
    return "all_gather", tuple(together), after


def uneven_dims(shape: Sequence[int], source: Layout, target: Layout, mesh_shape: Sequence[int]) -> frozenset[int]:
    """Dims of a tensor that one of the two layouts cuts into unequal blocks; they take no all_to_all."""
    found = set()
    for layout in (source, target):
        for dim in {p.dim for p in layout if isinstance(p, Shard)}:
            cut = math.prod(
                size for size, p in zip(mesh_shape, layout, strict=True) if isinstance(p, Shard) and p.dim == dim
            )
            if shape[dim] % cut:
                found.add(dim)
    return frozenset(found)
