"""Redistribution: the steps that bring a tensor from one layout to another. Found here once, read twice.

    (P(sum), R) -> (S(0), R)     reduce_scatter over axis 0
    (S(0), S(0)) -> (R, R)       one all_gather over both axes
    (S(0), S(0)) -> (S(1), S(1)) one all_to_all over both axes
    (S(0), S(0)) -> (R, S(0))    all_gather over both axes (the inner blocks lie inside the outer ones), then slice

`moves.py` says what axes do where sizes decide nothing. Sizes decide the way: the first on which all layouts are legal
and no all_to_all within one dim overlaps itself. The planner prices exactly these steps
(`planner/routes/priced_routes.py`) and the lowering emits exactly these steps
(`passes/lowering/emit_redistribution.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from autopar.layouts.moves import BUFFER_BEHIND, REPLICATED, StepKind, Way, moves_on
from autopar.layouts.placement import Layout, Mesh, Partial, Placement, Replicate, Shard, is_even, is_legal
from autopar.layouts.views import canonical

Shape = tuple[int, ...]

WAITING_ELEMENTS = 2**20
"""Tensors of this many elements gain from one more exchange that makes the next collective smaller; for smaller ones
the start of a collective counts as much as what it moves (H100 nodes and gloo)."""


@dataclass(frozen=True, slots=True)
class RedistributionStep:
    """One collective (or local slice) over `axes`, ascending; before and after are whole layouts."""

    kind: StepKind
    axes: tuple[int, ...]
    before: Layout
    after: Layout

    @property
    def buffer(self) -> Layout:
        """The layout whose blocks are the full buffers of the collective: what a gather makes, what a slice keeps."""
        return self.after if self.kind in BUFFER_BEHIND else self.before

    @property
    def is_transposing(self) -> bool:
        """Whether the blocks that move are strided in memory: those of every dim but the first."""
        moved = (placed for axis in self.axes for placed in (self.before[axis], self.after[axis]))
        return any(isinstance(placed, Shard) and placed != Shard(0) for placed in moved)


def is_reachable(source: Layout, target: Layout) -> bool:
    """Nothing turns into a Partial; every other pair has a redistribution."""
    return all(a == b or not isinstance(b, Partial) for a, b in zip(source, target, strict=True))


@cache
def redistribution_steps(shape: Shape, source: Layout, target: Layout, mesh: Mesh) -> tuple[RedistributionStep, ...]:
    """The steps for a tensor of global `shape`; empty when both layouts place it equally.

    Raises ValueError for a target that cannot be reached (something else -> Partial).
    """
    source, target = canonical(shape, source, mesh.shape), canonical(shape, target, mesh.shape)
    if source == target:
        return ()
    uneven = uneven_dims(shape, source, mesh) | uneven_dims(shape, target, mesh)
    spare = spare_factor(shape, source, target, mesh)
    for way in Way if spare is not None else (Way.STRAIGHT, Way.OVER_COMMON):
        steps = steps_on(way, source, target, uneven, spare)
        if all(_is_possible(shape, step, mesh) for step in steps):
            break
    return tuple(part for step in steps if _moves(shape, step, mesh) for part in _axis_by_axis(shape, step, mesh))


def steps_on(
    way: Way,
    source: Layout,
    target: Layout,
    uneven: Iterable[int] = (),
    spare: Shard | None = None,
) -> tuple[RedistributionStep, ...]:
    """The steps on one way, whatever the sizes are. Dims in `uneven` do not divide, so they take no all_to_all.

    spare: a factor that neither layout cuts and all axes divide, for `Way.WAITING`.

    Raises ValueError for a target that cannot be reached (something else -> Partial).
    """
    if not is_reachable(source, target):
        raise ValueError(f"no redistribution from {source} to {target}: nothing turns into a Partial")
    numbers, placements = _numbered((*source, *target, *([] if spare is None else [spare])))
    dims = set(uneven)
    moves = _moves_on(
        way,
        tuple([numbers[p] for p in source]),
        tuple([numbers[p] for p in target]),
        frozenset(n for n, p in placements.items() if isinstance(p, Shard) and p.dim in dims) if dims else frozenset(),
        None if spare is None else numbers[spare],
    )
    layouts = [source, *(tuple([placements[n] for n in move.after]) for move in moves)]
    return tuple(
        RedistributionStep(move.kind, move.axes, before, after)
        for move, before, after in zip(moves, layouts, layouts[1:], strict=False)
    )


_moves_on = cache(moves_on)


def _numbered(placements: Sequence[Placement]) -> tuple[dict[Placement, int], dict[int, Placement]]:
    """The numbers by which `moves.py` knows placements, and back."""
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


@cache
def uneven_dims(shape: Shape, layout: Layout, mesh: Mesh) -> frozenset[int]:
    """Dims of a tensor that a layout cuts into unequal blocks; they take no all_to_all."""
    dims = {p.dim for _, p in zip(mesh.shape, layout, strict=True) if isinstance(p, Shard)}
    return frozenset(dim for dim in dims if not is_even(shape, layout, dim, mesh))


def spare_dims(shape: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The dims in which an axis may wait for another one: all axes divide them, and the tensor is worth it."""
    if math.prod(shape) < WAITING_ELEMENTS:
        return ()
    return tuple(dim for dim, size in enumerate(shape) if size % ranks == 0)


def spare_factor(shape: Sequence[int], source: Layout, target: Layout, mesh: Mesh) -> Shard | None:
    """The last spare dim that neither layout cuts."""
    cut = {p.dim for p in (*source, *target) if isinstance(p, Shard)}
    return next((Shard(dim) for dim in reversed(spare_dims(shape, mesh.size)) if dim not in cut), None)


def _moves(shape: Shape, step: RedistributionStep, mesh: Mesh) -> bool:
    """Whether a step moves anything: some only change the spelling."""
    return canonical(shape, step.before, mesh.shape) != canonical(shape, step.after, mesh.shape)


_is_legal = cache(is_legal)


def _is_possible(shape: Shape, step: RedistributionStep, mesh: Mesh) -> bool:
    """Whether the layouts around a step are legal and no all_to_all within one dim overlaps itself."""
    if not (_is_legal(shape, step.before, mesh) and _is_legal(shape, step.after, mesh)):
        return False
    if step.kind != "all_to_all" or not _moves(shape, step, mesh):
        return True
    left = {p.dim for axis in step.axes if isinstance(p := step.before[axis], Shard)}
    entered = {p.dim for axis in step.axes if isinstance(p := step.after[axis], Shard)}
    if not left & entered:
        return True
    again = (*step.before, *(step.after[axis] for axis in step.axes))
    names = tuple(f"{mesh.axis_names[axis]} again" for axis in step.axes)
    both = Mesh((*mesh.axis_names, *names), (*mesh.shape, *(mesh.shape[axis] for axis in step.axes)))
    return is_legal(shape, again, both)


def _axis_by_axis(shape: Shape, step: RedistributionStep, mesh: Mesh) -> tuple[RedistributionStep, ...]:
    """Split a collective over several axes if two of them cut one uneven dim: its blocks have different paddings."""
    if len(step.axes) == 1 or step.kind not in ("all_gather", "reduce_scatter"):
        return (step,)
    is_gather = step.kind == "all_gather"
    cut = step.before if is_gather else step.after
    dims = [p.dim for axis in step.axes if isinstance(p := cut[axis], Shard)]
    uneven = uneven_dims(shape, step.before, mesh) | uneven_dims(shape, step.after, mesh)
    if all(dims.count(dim) == 1 or dim not in uneven for dim in dims):
        return (step,)
    steps, before = [], step.before
    for axis in reversed(step.axes) if is_gather else step.axes:
        after = (*before[:axis], step.after[axis], *before[axis + 1 :])
        steps.append(replace(step, axes=(axis,), before=before, after=after))
        before = after
    return tuple(steps)
