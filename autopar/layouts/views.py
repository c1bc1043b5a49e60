"""Views: what a layout is called behind a reshape, and the one spelling of a layout.

The dims of a view fall into groups: neighbouring input dims and neighbouring output dims with equal products. A group
is one flat index space. `Shard(dim, split)` cuts there at a position, the product of everything in front of the sharded
factor; the position finds the dim on the other side whose range of cumulative products contains it.

    (8, 6) -> (48,)         S(1) cuts at position 8        -> S(0, split=8)
    (12,) -> (3, 4)         S(0) over 3 ranks, position 1  -> S(0);  over 2 ranks: None, 3 does not divide
    (16,) -> (2, 8)         (S(0), S(0)) on a (2, 4) mesh  -> (S(0), S(1))
    (30,) -> (15, 2)        S(0) over 4 ranks: None, uneven blocks pass only where the cut factor stays as it is:
    (2, 15) -> (30,)        S(1) over 4 ranks -> S(0, split=2)

Layouts have one spelling here (`canonical`): axes that cut one behind the other nest (S(0), S(0)) and are never written
(S(0), S(0, split=n)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from autopar.layouts.placement import Layout, Placement, Replicate, Shard, sharded_axes

Shape = tuple[int, ...]


@cache
def reshape_layout(source: Shape, target: Shape, layout: Layout, mesh_shape: tuple[int, ...]) -> Layout | None:
    """Layout over shape `target` of the data that `layout` gives each rank of a tensor of shape `source`."""
    if source == target:
        return layout
    if math.prod(source) == 0:
        return layout if not any(isinstance(p, Shard) for p in layout) else None
    split = tuple(p if n > 1 else Replicate() for p, n in zip(layout, mesh_shape, strict=True))
    if any(isinstance(p, Shard) and source[p.dim] == 1 for p in split):
        return None
    found: list[Placement] = list(split)
    for inner, outer in dimension_groups(source, target):
        mapped = _map_group(source, target, inner, outer, split, mesh_shape)
        if mapped is None:
            return None
        for axis, shard in mapped.items():
            found[axis] = shard
    return tuple(found)


@cache
def canonical(shape: Shape, layout: Layout, mesh_shape: tuple[int, ...]) -> Layout:
    """The one spelling of `layout`: what nests is written as nested, so that equal layouts compare equal."""
    found: list[Placement] = list(layout)
    for dim in {p.dim for p in layout if isinstance(p, Shard)}:
        axes = sharded_axes(layout, dim)
        if any(split > 1 for split, _ in axes):
            found_splits = _splits(cut_positions(layout, dim, mesh_shape), _zigzags(layout), mesh_shape)
            for axis, split in found_splits.items():
                found[axis] = Shard(dim, split, axis in _zigzags(layout))
    return tuple(found)


@cache
def dimension_groups(source: Shape, target: Shape) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Pairs (source dims, target dims) of equal product, smallest first; dims of size 1 belong to none."""
    left = [dim for dim, size in enumerate(source) if size != 1]
    right = [dim for dim, size in enumerate(target) if size != 1]
    groups = []
    i = j = 0
    while i < len(left):
        first_i, first_j = i, j
        product, other = source[left[i]], target[right[j]]
        while product != other:
            if product < other:
                i += 1
                product *= source[left[i]]
            else:
                j += 1
                other *= target[right[j]]
        i, j = i + 1, j + 1
        groups.append((tuple(left[first_i:i]), tuple(right[first_j:j])))
    return tuple(groups)


def cut_positions(layout: Layout, dim: int, mesh_shape: Shape) -> dict[int, int]:
    """Axis -> product of everything in front of the factor of `dim` that it cuts, for the axes that shard `dim`."""
    positions = {}
    previous, nested = 0, 1
    for split, axis in sharded_axes(layout, dim):
        nested = nested if split == previous else 1
        positions[axis] = split * nested
        previous, nested = split, nested * mesh_shape[axis]
    return positions


def _map_group(
    source: Shape, target: Shape, inner: Sequence[int], outer: Sequence[int], layout: Layout, mesh_shape: Shape
) -> dict[int, Shard] | None:
    """Axis -> Shard over the dims `outer` of `target`, for the axes that shard the dims `inner` of `source`."""
    if len(inner) == 1 and len(outer) == 1:
        (target_dim,) = outer
        return {
            axis: Shard(target_dim, p.split, p.zigzag)
            for axis, p in enumerate(layout)
            if isinstance(p, Shard) and p.dim == inner[0]
        }
    zigzags = _zigzags(layout)
    positions, uneven = _positions(layout, inner, source, mesh_shape)
    per_dim: dict[int, dict[int, int]] = {}
    for axis, position in positions.items():
        base, last = uneven.get(axis, (position, None))
        start = 1
        for dim in outer:
            end = start * target[dim]
            if start <= base < end:
                break
            start = end
        else:
            return None
        if base % start or (end % (position * mesh_shape[axis]) if last is None else end != last):
            return None
        if axis in zigzags and position // start % 2:
            return None  # the pair of pieces would lie in two dims
        per_dim.setdefault(dim, {})[axis] = position // start
    return {
        axis: Shard(dim, split, axis in zigzags)
        for dim, cuts in per_dim.items()
        for axis, split in _splits(cuts, zigzags, mesh_shape).items()
    }


def _positions(
    layout: Layout, dims: Sequence[int], shape: Shape, mesh_shape: Shape
) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
    """Axis -> product of everything in front of the factor that it cuts, in the flat index space of `dims`. And of the
    axes that cut a factor unevenly, one behind the other: where it begins and where it ends."""
    positions, uneven = dict[int, int](), dict[int, tuple[int, int]]()
    start = 1
    for dim in dims:
        base = 0
        for axis, position in cut_positions(layout, dim, mesh_shape).items():
            positions[axis] = start * position
            if base or shape[dim] % (position * mesh_shape[axis]):
                base = base or start * position
                uneven[axis] = base, start * shape[dim]
        start *= shape[dim]
    return positions, uneven


def _splits(positions: dict[int, int], zigzags: frozenset[int], mesh_shape: Shape) -> dict[int, int]:
    """Axis -> split within one dim: an axis that cuts right behind an outer axis, in the same order, nests in it."""
    splits: dict[int, int] = {}
    split, end, last = 0, 0, -1
    for position, axis in sorted((position, axis) for axis, position in positions.items()):
        if not (position == end and axis > last and (axis in zigzags) == (last in zigzags)):
            split = position
        splits[axis] = split
        end, last = position * mesh_shape[axis], axis
    return splits


def _zigzags(layout: Layout) -> frozenset[int]:
    """The axes whose blocks lie in zigzag order."""
    return frozenset(axis for axis, p in enumerate(layout) if isinstance(p, Shard) and p.zigzag)
