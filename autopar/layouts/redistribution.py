"""Redistribution: which collectives turn one layout into another. One table, two readers.

    (P(sum), R) -> (S(0), R)     reduce_scatter over axis 0
    (S(0), S(0)) -> (R, R)       one all_gather over both axes
    (S(0), S(0)) -> (S(1), S(1)) one all_to_all over both axes
    (S(0), S(0)) -> (R, S(0))    all_gather over both axes (the inner blocks lie inside the outer ones), then slice

`moves.py` names the move of one axis, orders the moves of all axes, merges equal moves into one collective over several
axes, and inserts the extra gathers that nested shards need. Cost models price exactly these
steps and the lowering emits exactly these steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from autopar.layouts.moves import REPLICATED, StepKind, find_moves
from autopar.layouts.placement import Layout, Partial, Placement, Replicate, Shard


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
    numbers, placements = _numbered((*source, *target, *([] if spare is None else [spare])))
    uneven = [n for n, p in placements.items() if isinstance(p, Shard) and p.dim in uneven_dims]
    moves = find_moves(
        tuple([numbers[p] for p in source]),
        tuple([numbers[p] for p in target]),
        uneven,
        None if spare is None else numbers[spare],
    )
    layouts = [source, *(tuple([placements[n] for n in move.after]) for move in moves)]
    return tuple(
        Step(move.kind, move.axes, before, after, _fraction(before, mesh_shape))
        for move, before, after in zip(moves, layouts, layouts[1:], strict=False)
    )


def _numbered(placements: Sequence[Placement]) -> tuple[dict[Placement, int], dict[int, Placement]]:
    """The numbers by which `find_moves` knows placements, and back."""
    numbers: dict[Placement, int] = {Replicate(): REPLICATED}
    factors = reductions = 0
    for placement in placements:
        if placement not in numbers:
            if isinstance(placement, Shard):
                numbers[placement] = factors
                factors += 1
            else:
                reductions += 1
                numbers[placement] = REPLICATED - reductions
    return numbers, {number: placement for placement, number in numbers.items()}


def _fraction(layout: Layout, mesh_shape: Sequence[int]) -> float:
    return 1.0 / math.prod(mesh_shape[axis] for axis, p in enumerate(layout) if isinstance(p, Shard))


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
