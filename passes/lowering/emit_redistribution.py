"""Emit the steps of a redistribution as nodes: `autopar.layouts.redistribution` says which, this file says how.

    (S(1), R) -> (R, R)    pieces = all_gather_into_tensor(padded(x)); wait; pieces_joined(...)
    (P, R) -> (S(1), R)    reduce_scatter_tensor(pieces_first(x)); wait; trimmed(...)
    (R, R) -> (S(0), R)    region(x, starts, lengths)

A collective over several axes is one call over their flattened group; what the axes cut is described by cuts
(`autopar.ops.blocks`). Blocks of uneven dims are padded to the first (largest) block in front of a collective and
trimmed behind it; a dim whose pieces are cut unevenly is seen as two for that time:

    (S(0, split=2), R) -> (R, R) of (2 x 31)    x seen as (2, 8): (S(1), R) -> (R, R) of (2, 31); seen as 62 rows
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from autopar.layouts.moves import StepKind
from autopar.layouts.placement import Layout, Mesh, Partial, Shard, chunk, local_runs, sharded_axes, uneven_pieces
from autopar.layouts.redistribution import RedistributionStep, Shape, redistribution_steps
from autopar.layouts.views import reshape_layout
from autopar.ops.blocks import Cut, in_zigzag, padded, piece, pieces_first, pieces_joined, region, strips, trimmed
from autopar.passes.emitter import Emitter

c10d = torch.ops._c10d_functional
Run = tuple[int, int]


def emit_redistribution(emit: Emitter, value: fx.Node, shape: Shape, source: Layout, target: Layout) -> fx.Node:
    """The local block of a tensor of global `shape` in layout `target`, given the one in `source`.

    Raises ValueError when `target` cannot be reached (something else -> Partial).
    """
    for step in redistribution_steps(shape, source, target, emit.mesh):
        value = _emit_step(emit, value, shape, step)
    return value


def _emit_step(emit: Emitter, value: fx.Node, shape: Shape, step: RedistributionStep) -> fx.Node:
    splits = uneven_pieces(shape, step.before, emit.mesh) | uneven_pieces(shape, step.after, emit.mesh)
    if not splits:
        return _EMIT[step.kind](emit, value, shape, step)
    opened = tuple(part for dim, n in enumerate(shape) for part in _opened(n, splits.get(dim)))
    before, after = (_behind_view(shape, opened, each, emit.mesh) for each in (step.before, step.after))
    seen = _seen(emit, value, emit.local_shape(opened, before))
    axes = tuple(axis for axis in step.axes if emit.mesh.shape[axis] > 1)  # the others lie nowhere behind a view
    moved = _EMIT[step.kind](emit, seen, opened, replace(step, axes=axes, before=before, after=after))
    return _seen(emit, moved, emit.local_shape(shape, step.after))


def _behind_view(shape: Shape, opened: Shape, layout: Layout, mesh: Mesh) -> Layout:
    found = reshape_layout(shape, opened, layout, mesh.shape)
    assert found is not None, f"{layout}: what lies in front of uneven pieces of {shape} divides"
    return found


def _opened(size: int, split: int | None) -> Shape:
    return (size,) if split is None else (split, size // split)


def _seen(emit: Emitter, value: fx.Node, shape: Shape) -> fx.Node:
    return emit.call(torch.ops.aten.reshape.default, (value, list(shape)), shape, value.meta["dtype"])


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


def _zigzags(cuts: Sequence[Cut], cut: Layout, axes: Sequence[int]) -> list[Cut]:
    """Of the axes that cut in zigzag order, what `in_zigzag` takes: axes that nest are one."""
    found: dict[tuple[int, int], Cut] = {}
    for axis, (dim, position, pieces) in zip(axes, cuts, strict=True):
        placement = cut[axis]
        if isinstance(placement, Shard) and placement.zigzag:
            _, first, before = found.get((dim, placement.split), (dim, position, 1))
            found[dim, placement.split] = (dim, first, before * pieces)
    return list(found.values())


def _turned(emit: Emitter, value: fx.Node, shape: Shape, zigzags: Sequence[Cut]) -> fx.Node:
    """Between the order of the tensor and the one in which its blocks are dealt out."""
    for cut in zigzags:
        value = emit.call(in_zigzag, (value, *cut), shape, value.meta["dtype"])
    return value


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


def _slice(emit: Emitter, value: fx.Node, shape: Shape, step: RedistributionStep) -> fx.Node:
    """Plain dims by one range each, which may be uneven; dims with a strided factor by pieces, in zigzag by strips."""
    here = emit.local_shape(shape, step.before)
    starts, lengths = [0] * len(shape), list(here)
    strided, zigzags = [], dict[int, None]()
    for axis in step.axes:
        placement = step.after[axis]
        assert isinstance(placement, Shard)
        dim = placement.dim
        if any(isinstance(p, Shard) and p.dim == dim and p.zigzag for p in step.after):
            zigzags[dim] = None
        elif any(split > 1 for split, _ in sharded_axes(step.after, dim)):
            strided.append(axis)
        else:
            begin, lengths[dim] = chunk(lengths[dim], emit.mesh.shape[axis], emit.coordinate[axis])
            starts[dim] += begin
    dtype = value.meta["dtype"]
    if tuple(lengths) != here:
        value = emit.call(region, (value, tuple(starts), tuple(lengths)), tuple(lengths), dtype)
    for dim in zigzags:
        held, kept = (
            local_runs(shape[dim], layout, dim, emit.mesh, emit.coordinate) for layout in (step.before, step.after)
        )
        lengths[dim] = sum(length for _, length in kept)
        value = emit.call(strips, (value, dim, _places(kept, held)), tuple(lengths), dtype)
    result = emit.local_shape(shape, step.after)
    if tuple(lengths) == result:
        return value
    cuts = block_cuts(step.before, step.after, strided, emit.mesh)
    return emit.call(piece, (value, cuts, tuple(emit.coordinate[axis] for axis in strided)), result, dtype)


def _places(kept: Sequence[Run], held: Sequence[Run]) -> tuple[Run, ...]:
    """Runs of global indices, as (start, length) among those that a rank holds."""
    offsets = [0, *itertools.accumulate(length for _, length in held)]
    pairs = [(start, offset) for (start, _), offset in zip(held, offsets, strict=False)]
    found = []
    for start, length in kept:
        first, offset = max(pair for pair in pairs if pair[0] <= start)
        found.append((offset + start - first, length))
    return tuple(found)


def _all_gather(emit: Emitter, value: fx.Node, shape: Shape, step: RedistributionStep) -> fx.Node:
    ranks = emit.group_size(step.axes)
    if ranks == 1:
        return value
    dtype = value.meta["dtype"]
    result = emit.local_shape(shape, step.after)
    cuts = block_cuts(step.after, step.before, step.axes, emit.mesh)
    whole = _grown(result, cuts)
    sent = _divided(whole, cuts)
    x = emit.call(padded, (value, sent), sent, dtype)
    full = emit.largest_block(shape, step.buffer)
    y = emit.collective(c10d.all_gather_into_tensor.default, x, (ranks,), step.axes, _stacked(sent, ranks), full)
    joined = emit.call(pieces_joined, (y, cuts, whole, result), result, dtype)
    return _turned(emit, joined, result, _zigzags(cuts, step.before, step.axes))


def _reduce_scatter(emit: Emitter, value: fx.Node, shape: Shape, step: RedistributionStep) -> fx.Node:
    ranks = emit.group_size(step.axes)
    if ranks == 1:
        return value
    dtype = value.meta["dtype"]
    result = emit.local_shape(shape, step.after)
    cuts = block_cuts(step.before, step.after, step.axes, emit.mesh)
    whole = _grown(emit.local_shape(shape, step.before), cuts)
    kept = _divided(whole, cuts)
    value = _turned(emit, value, whole, _zigzags(cuts, step.after, step.axes))
    x = emit.call(pieces_first, (value, cuts, whole), _stacked(kept, ranks), dtype)
    operation = _reduction(step)
    full = emit.largest_block(shape, step.buffer)
    y = emit.collective(c10d.reduce_scatter_tensor.default, x, (operation, ranks), step.axes, kept, full)
    return y if kept == result else emit.call(trimmed, (y, result), result, dtype)


def _all_reduce(emit: Emitter, value: fx.Node, shape: Shape, step: RedistributionStep) -> fx.Node:
    if emit.group_size(step.axes) == 1:
        return value
    result = emit.local_shape(shape, step.after)
    x = emit.call(torch.ops.aten.contiguous.default, (value,), result, value.meta["dtype"])
    full = emit.largest_block(shape, step.buffer)
    return emit.collective(c10d.all_reduce.default, x, (_reduction(step),), step.axes, result, full)


def _all_to_all(emit: Emitter, value: fx.Node, shape: Shape, step: RedistributionStep) -> fx.Node:
    ranks = emit.group_size(step.axes)
    if ranks == 1:
        return value
    dtype = value.meta["dtype"]
    here = emit.local_shape(shape, step.before)
    result = emit.local_shape(shape, step.after)
    leaving = block_cuts(step.before, step.after, step.axes, emit.mesh)
    joining = block_cuts(step.after, step.before, step.axes, emit.mesh)
    sent = _stacked(_divided(here, leaving), ranks)
    value = _turned(emit, value, here, _zigzags(leaving, step.after, step.axes))
    x = emit.call(pieces_first, (value, leaving, here), sent, dtype)
    rows = [sent[0] // ranks] * ranks
    y = emit.collective(c10d.all_to_all_single.default, x, (rows, rows), step.axes, sent)
    joined = emit.call(pieces_joined, (y, joining, result, result), result, dtype)
    return _turned(emit, joined, result, _zigzags(joining, step.before, step.axes))


def _reduction(step: RedistributionStep) -> str:
    placement = step.before[step.axes[0]]
    assert isinstance(placement, Partial)
    return placement.op


_EMIT: Mapping[StepKind, Callable[[Emitter, fx.Node, Shape, RedistributionStep], fx.Node]] = {
    "slice": _slice,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}
