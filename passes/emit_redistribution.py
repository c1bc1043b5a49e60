"""Emit the steps of a redistribution as nodes: `autopar.layouts.redistribution` says which, this file says how.

    (S(1), R) -> (R, R)    pieces = all_gather_into_tensor(padded(x)); wait; pieces_joined(...)
    (P, R) -> (S(1), R)    reduce_scatter_tensor(pieces_first(x)); wait; trimmed(...)
    (R, R) -> (S(0), R)    region(x, starts, lengths)

A collective over several axes is one call over their flattened group; what the axes cut is described by cuts
(`autopar.ops.blocks`). Blocks of uneven dims are padded to the first (largest) block in front of a collective and
trimmed behind it; a dim that two axes cut unevenly is gathered axis by axis, since its blocks have different paddings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import fx

from autopar.layouts.placement import Layout, Mesh, Partial, Replicate, Shard, chunk, is_legal, sharded_axes
from autopar.layouts.redistribution import Step, redistribution, uneven_dims
from autopar.layouts.views import canonical
from autopar.ops.blocks import Cut, padded, piece, pieces_first, pieces_joined, region, trimmed
from autopar.passes.emitter import Emitter

c10d = torch.ops._c10d_functional

Shape = tuple[int, ...]

WAITING_ELEMENTS = 2**20
"""Tensors of this many elements gain from one more exchange that makes the next collective smaller; for smaller ones
the start of a collective counts as much as what it moves (H100 nodes and gloo)."""


def emit_redistribution(emit: Emitter, value: fx.Node, shape: Shape, source: Layout, target: Layout) -> fx.Node:
    """The local block of a tensor of global `shape` in layout `target`, given the one in `source`.

    Raises ValueError when `target` cannot be reached (something else -> Partial).
    """
    for step in redistribution_steps(shape, source, target, emit.mesh):
        value = _EMIT[step.kind](emit, value, shape, step)
    return value


@cache
def redistribution_steps(shape: Shape, source: Layout, target: Layout, mesh: Mesh) -> tuple[Step, ...]:
    """The steps that the lowering emits for a tensor of this shape; empty when both layouts place it equally."""
    source, target = canonical(shape, source, mesh.shape), canonical(shape, target, mesh.shape)
    if source == target:
        return ()
    uneven = uneven_dims(shape, source, target, mesh.shape)
    steps = redistribution(source, target, mesh.shape, uneven, spare_factor(shape, source, target, mesh))
    if not all(_is_possible(shape, step, mesh) for step in steps):
        steps = redistribution(source, target, mesh.shape, uneven)
    if not all(_is_possible(shape, step, mesh) for step in steps):
        steps = _through_common_layout(shape, source, target, mesh)
    return tuple(part for step in steps if _moves(shape, step, mesh) for part in _axis_by_axis(shape, step, mesh))


def spare_dims(shape: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The dims in which an axis may wait for another one: all axes divide them, and the tensor is worth it."""
    if math.prod(shape) < WAITING_ELEMENTS:
        return ()
    return tuple(dim for dim, size in enumerate(shape) if size % ranks == 0)


def spare_factor(shape: Sequence[int], source: Layout, target: Layout, mesh: Mesh) -> Shard | None:
    """The last spare dim that neither layout cuts."""
    cut = {p.dim for p in (*source, *target) if isinstance(p, Shard)}
    return next((Shard(dim) for dim in reversed(spare_dims(shape, mesh.size)) if dim not in cut), None)


def _moves(shape: Shape, step: Step, mesh: Mesh) -> bool:
    """Whether a step moves anything: some only change the spelling."""
    return canonical(shape, step.before, mesh.shape) != canonical(shape, step.after, mesh.shape)


def _through_common_layout(shape: Shape, source: Layout, target: Layout, mesh: Mesh) -> tuple[Step, ...]:
    """Steps that first leave everything that changes: always possible, never over illegal layouts."""
    common = tuple(a if a == b else Replicate() for a, b in zip(source, target, strict=True))
    uneven = uneven_dims(shape, source, target, mesh.shape)
    return (
        *redistribution(source, common, mesh.shape, uneven),
        *redistribution(common, target, mesh.shape, uneven),
    )


def _is_possible(shape: Shape, step: Step, mesh: Mesh) -> bool:
    """Whether the layouts around a step are legal and no all_to_all within one dim overlaps itself."""
    if not (is_legal(shape, step.before, mesh) and is_legal(shape, step.after, mesh)):
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


def _axis_by_axis(shape: Shape, step: Step, mesh: Mesh) -> tuple[Step, ...]:
    """Split a collective over several axes if two of them cut one uneven dim."""
    whole = step.after if step.kind == "all_gather" else step.before
    cut = step.before if step.kind == "all_gather" else step.after
    dims = [p.dim for axis in step.axes if isinstance(p := cut[axis], Shard)]
    if step.kind not in ("all_gather", "reduce_scatter") or all(
        dims.count(dim) == 1 or dim not in uneven_dims(shape, whole, cut, mesh.shape) for dim in dims
    ):
        return (step,)
    order = reversed(step.axes) if step.kind == "all_gather" else step.axes
    steps, current, fraction = [], list(step.before), step.local_fraction
    for axis in order:
        before = tuple(current)
        current[axis] = step.after[axis]
        steps.append(replace(step, axes=(axis,), before=before, after=tuple(current), local_fraction=fraction))
        fraction *= mesh.shape[axis] if step.kind == "all_gather" else 1 / mesh.shape[axis]
    return tuple(steps)


def block_cuts(whole: Layout, cut: Layout, axes: Sequence[int], mesh: Mesh) -> tuple[Cut, ...]:
    """How `axes`, sharded in `cut` and not in `whole`, cut the local block that a rank holds in `whole`."""
    cuts = []
    for axis in axes:
        placement = cut[axis]
        assert isinstance(placement, Shard)
        in_front = [a for split, a in sharded_axes(whole, placement.dim) if split < placement.split]
        nested = [a for a in axes if a < axis and cut[a] == placement]
        position = placement.split // math.prod(mesh.shape[a] for a in in_front)
        position *= math.prod(mesh.shape[a] for a in nested)
        cuts.append((placement.dim, position, mesh.shape[axis]))
    return tuple(cuts)


def _grown(shape: Shape, cuts: Sequence[Cut]) -> Shape:
    """`shape` with every cut dim rounded up to a multiple of its pieces."""
    grown = list(shape)
    for dim in {cut[0] for cut in cuts}:
        pieces = math.prod(cut[2] for cut in cuts if cut[0] == dim)
        grown[dim] = -(-grown[dim] // pieces) * pieces
    return tuple(grown)


def _divided(shape: Shape, cuts: Sequence[Cut]) -> Shape:
    sizes = list(shape)
    for dim, _, pieces in cuts:
        sizes[dim] //= pieces
    return tuple(sizes)


def _stacked(block_shape: Shape, ranks: int) -> Shape:
    return (ranks * block_shape[0], *block_shape[1:])


def _slice(emit: Emitter, value: fx.Node, shape: Shape, step: Step) -> fx.Node:
    """Plain dims by one range each, which may be uneven; dims with a strided factor by pieces."""
    here = emit.local_shape(shape, step.before)
    starts, lengths = [0] * len(shape), list(here)
    strided = []
    for axis in step.axes:
        placement = step.after[axis]
        assert isinstance(placement, Shard)
        dim = placement.dim
        if any(split > 1 for split, _ in sharded_axes(step.after, dim)):
            strided.append(axis)
        else:
            begin, lengths[dim] = chunk(lengths[dim], emit.mesh.shape[axis], emit.coordinate[axis])
            starts[dim] += begin
    dtype = value.meta["dtype"]
    if tuple(lengths) != here:
        value = emit.call(region, (value, tuple(starts), tuple(lengths)), tuple(lengths), dtype)
    result = emit.local_shape(shape, step.after)
    if tuple(lengths) == result:
        return value
    cuts = block_cuts(step.before, step.after, strided, emit.mesh)
    return emit.call(piece, (value, cuts, tuple(emit.coordinate[axis] for axis in strided)), result, dtype)


def _all_gather(emit: Emitter, value: fx.Node, shape: Shape, step: Step) -> fx.Node:
    ranks = emit.group_size(step.axes)
    if ranks == 1:
        return value
    dtype = value.meta["dtype"]
    result = emit.local_shape(shape, step.after)
    cuts = block_cuts(step.after, step.before, step.axes, emit.mesh)
    whole = _grown(result, cuts)
    sent = _divided(whole, cuts)
    x = emit.call(padded, (value, sent), sent, dtype)
    full = emit.largest_block(shape, step.after)
    y = emit.collective(c10d.all_gather_into_tensor.default, x, (ranks,), step.axes, _stacked(sent, ranks), full)
    return emit.call(pieces_joined, (y, cuts, whole, result), result, dtype)


def _reduce_scatter(emit: Emitter, value: fx.Node, shape: Shape, step: Step) -> fx.Node:
    ranks = emit.group_size(step.axes)
    if ranks == 1:
        return value
    dtype = value.meta["dtype"]
    result = emit.local_shape(shape, step.after)
    cuts = block_cuts(step.before, step.after, step.axes, emit.mesh)
    whole = _grown(emit.local_shape(shape, step.before), cuts)
    kept = _divided(whole, cuts)
    x = emit.call(pieces_first, (value, cuts, whole), _stacked(kept, ranks), dtype)
    operation = _reduction(step)
    full = emit.largest_block(shape, step.before)
    y = emit.collective(c10d.reduce_scatter_tensor.default, x, (operation, ranks), step.axes, kept, full)
    return y if kept == result else emit.call(trimmed, (y, result), result, dtype)


def _all_reduce(emit: Emitter, value: fx.Node, shape: Shape, step: Step) -> fx.Node:
    if emit.group_size(step.axes) == 1:
        return value
    result = emit.local_shape(shape, step.after)
    x = emit.call(torch.ops.aten.contiguous.default, (value,), result, value.meta["dtype"])
    full = emit.largest_block(shape, step.after)
    return emit.collective(c10d.all_reduce.default, x, (_reduction(step),), step.axes, result, full)


def _all_to_all(emit: Emitter, value: fx.Node, shape: Shape, step: Step) -> fx.Node:
    ranks = emit.group_size(step.axes)
    if ranks == 1:
        return value
    dtype = value.meta["dtype"]
    here = emit.local_shape(shape, step.before)
    result = emit.local_shape(shape, step.after)
    leaving = block_cuts(step.before, step.after, step.axes, emit.mesh)
    joining = block_cuts(step.after, step.before, step.axes, emit.mesh)
    sent = _stacked(_divided(here, leaving), ranks)
    x = emit.call(pieces_first, (value, leaving, here), sent, dtype)
    rows = [sent[0] // ranks] * ranks
    y = emit.collective(c10d.all_to_all_single.default, x, (rows, rows), step.axes, sent)
    return emit.call(pieces_joined, (y, joining, result, result), result, dtype)


def _reduction(step: Step) -> str:
    placement = step.before[step.axes[0]]
    assert isinstance(placement, Partial)
    return placement.op


_EMIT = {
    "slice": _slice,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}
