"""Layouts: how one tensor lies on a mesh, one placement per mesh axis.

    Shard(1)           the axis splits dim 1 into contiguous blocks of ceil(size / axis) (torch.chunk)
    Shard(1, split=3)  dim 1 is seen as (3, size / 3) and the axis splits the second factor (fused q|k|v: strided; the
                       sequence behind a batch of 3), in contiguous blocks of ceil(size / 3 / axis)
    Shard(1, split=2, zigzag=True)      the same, but of every second piece the blocks are dealt out in reverse: of 2 n
                       blocks of a sequence, coordinate r of n holds the r-th and the r-th from the end (causal
                       attention then costs every coordinate the same)
    Replicate()        every coordinate of the axis holds the same values
    Partial("sum")     the value is the sum (max, min) over the axis of what the coordinates hold

Names and printing follow torch.distributed.tensor. Two axes with the same dim and split nest from left to right, as
DTensor does: the first axis of the mesh takes the outer blocks; they are both in zigzag order, or neither. The largest
split of a dim may cut its pieces unevenly (ceil blocks); all in front of it divide, and what lies in zigzag order does.
Parameters, whose blocks torch reads, divide evenly wherever they are strided.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from autopar.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis splits dim `dim`, seen as (`split`, size / `split`), along the second factor; `zigzag`: in pieces of odd
    number from the last coordinate to the first. Then `split` is even. `order`: the dim, whose split is 1, lies in an
    order of its own: at position i its index order[i], alike for all axes that split it. Only runtimes know such
    layouts, of parameters whose experts a plan places (`Plan.expert_order`); no file says them."""

    dim: int
    split: int = 1
    zigzag: bool = False
    order: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.order:
            return f"S({self.dim}, order={'-'.join(map(str, self.order))})"
        if self.zigzag:
            return f"S({self.dim}, zigzag)" if self.split == 2 else f"S({self.dim}, split={self.split}, zigzag)"
        return f"S({self.dim})" if self.split == 1 else f"S({self.dim}, split={self.split})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of the axis holds the same values."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction (`sum`, `max`, `min`) over the axis of what its coordinates hold."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


Placement: TypeAlias = Shard | Replicate | Partial
Layout: TypeAlias = tuple[Placement, ...]

_PLACEMENT = re.compile(r"^(?:(R)|S\((\d+)(?:, *split=(\d+))?(, *zigzag)?\)|P\((sum|max|min)\))$")


def parse_placement(text: str) -> Placement:
    """`R`, `S(0)`, `S(1, split=3)`, `S(1, zigzag)`, `P(sum)` -> placement. Raises ConfigurationError with the text."""
    match = _PLACEMENT.match(text.strip())
    if match is None:
        raise ConfigurationError(
            f"{text!r} is no placement; write R, S(dim), S(dim, split=n), S(dim, zigzag) or "
            "P(sum|max|min)"
        )
    if match[1]:
        return Replicate()
    if match[2] is not None:
        return Shard(int(match[2]), int(match[3] or (2 if match[4] else 1)), match[4] is not None)
    return Partial(match[5])


def format_layout(layout: Layout) -> list[str]:
    """One string per mesh axis; `parse_layout` reads it back."""
    return [str(placement) for placement in layout]


def parse_layout(texts: Sequence[str]) -> Layout:
    """Inverse of `format_layout`. Raises ConfigurationError naming the text that is no placement."""
    return tuple(parse_placement(text) for text in texts)


def replicated(num_axes: int) -> Layout:
    """The layout that holds everything everywhere."""
    return (Replicate(),) * num_axes


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes over the ranks, row-major: the last axis is the innermost (fastest links)."""

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of `rank` on every axis."""
        coordinate = []
        for extent in reversed(self.shape):
            rank, position = divmod(rank, extent)
            coordinate.append(position)
        return tuple(reversed(coordinate))


def chunk(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """(start, length) of block `index` when `size` is cut as torch.chunk does; later blocks may be empty."""
    block = -(-size // num_chunks)
    start = min(size, block * index)
    return start, min(size, block * (index + 1)) - start


def sharded_axes(layout: Layout, dim: int) -> list[tuple[int, int]]:
    """(split, axis) of every axis that shards `dim`, outermost first (by split, then by mesh order)."""
    return sorted((p.split, axis) for axis, p in enumerate(layout) if isinstance(p, Shard) and p.dim == dim)


def local_shape(shape: Sequence[int], layout: Layout, mesh: Mesh, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Shape of the block that the rank at `coordinate` holds of a tensor of global `shape`."""
    local = list(shape)
    for axis, placement in enumerate(layout):
        if isinstance(placement, Shard):
            pieces = 1 if placement.split == 1 else _pieces_held(layout, axis, placement, mesh)
            _, length = chunk(local[placement.dim] // pieces, mesh.shape[axis], coordinate[axis])
            local[placement.dim] = pieces * length
    return tuple(local)


def _pieces_held(layout: Layout, axis: int, placement: Shard, mesh: Mesh) -> int:
    """How many of its `split` pieces lie in what the axes in front of `axis` leave of a dim."""
    outer = (
        size
        for before, size in zip(layout[:axis], mesh.shape, strict=False)
        if isinstance(before, Shard) and before.dim == placement.dim and before.split < placement.split
    )
    return max(placement.split // math.prod(outer), 1)


def local_start(size: int, layout: Layout, dim: int, mesh: Mesh, coordinate: Sequence[int]) -> int:
    """First global index along `dim` of the local block; only for dims sharded with split 1 throughout."""
    start, extent = 0, size
    for split, axis in sharded_axes(layout, dim):
        assert split == 1, "a strided shard has no single start"
        begin, extent = chunk(extent, mesh.shape[axis], coordinate[axis])
        start += begin
    return start


def is_legal(shape: Sequence[int], layout: Layout, mesh: Mesh) -> bool:
    """Whether `layout` can hold a tensor of `shape`: dims exist, no rank's block is empty (many kernels fail on empty
    blocks), and whatever lies in front of the largest split of a dim divides evenly."""
    sharded_dims = {p.dim for p in layout if isinstance(p, Shard)}
    return all(
        dim < len(shape) and _dim_is_legal(shape[dim], sharded_axes(layout, dim), layout, mesh) for dim in sharded_dims
    )


def _dim_is_legal(size: int, axes: list[tuple[int, int]], layout: Layout, mesh: Mesh) -> bool:
    if all(split == 1 for split, _ in axes):
        return _fills(size, [axis for _, axis in axes], mesh)
    boundary = 1  # number of equal parts into which the dim is cut so far
    previous = 1
    orders: dict[int, bool] = {}
    for split, axis in axes:
        placement = layout[axis]
        assert isinstance(placement, Shard)
        if orders.setdefault(split, placement.zigzag) != placement.zigzag:
            return False  # blocks that nest are dealt out alike
        if placement.zigzag and split != previous and split // boundary % 2:
            return False  # of a pair of pieces both lie in the block that is cut
        if placement.zigzag and split == 1:
            return False
        if split != previous:
            if split % boundary:
                return False  # the blocks of one split must lie whole inside the factor before the next
            boundary = previous = split
        boundary *= mesh.shape[axis]
    if size % boundary == 0:
        return True
    last = axes[-1][0]
    return size % last == 0 and not orders[last] and _fills(size // last, [a for s, a in axes if s == last], mesh)


def _fills(size: int, axes: Sequence[int], mesh: Mesh) -> bool:
    """Whether no rank is left without a part of `size` that axes cut one behind the other."""
    for axis in axes:
        size -= -(-size // mesh.shape[axis]) * (mesh.shape[axis] - 1)  # the last block, the smallest one
    return size > 0


def is_even(shape: Sequence[int], layout: Layout, dim: int, mesh: Mesh) -> bool:
    """Whether all ranks hold equally much of a dim that `layout` may cut."""
    axes = sharded_axes(layout, dim)
    last = axes[-1][0] if axes else 1
    return shape[dim] % (last * math.prod(mesh.shape[axis] for split, axis in axes if split == last)) == 0


def uneven_pieces(shape: Sequence[int], layout: Layout, mesh: Mesh) -> dict[int, int]:
    """Dim -> split, of the dims whose pieces are cut unevenly: a rank holds equally much of each piece."""
    splits = {p.dim: max(split for split, _ in sharded_axes(layout, p.dim)) for p in layout if isinstance(p, Shard)}
    return {dim: split for dim, split in splits.items() if split > 1 and not is_even(shape, layout, dim, mesh)}


def is_dtensor_layout(layout: Layout) -> bool:
    """Whether DTensor reassembles this layout: per dim at most one strided axis, and that one the innermost.

    Measured on torch 2.13: full_tensor() of two strided axes on one dim returns wrong values without an error.
    """
    for dim in {p.dim for p in layout if isinstance(p, Shard)}:
        splits = [p.split for p in layout if isinstance(p, Shard) and p.dim == dim]
        if any(split > 1 for split in splits[:-1]):
            return False
    return True


def zigzag_cuts(layout: Layout, mesh: Mesh) -> list[tuple[int, int, int]]:
    """(dim, split, ranks) of every dim whose blocks are dealt out in zigzag order, of the whole tensor."""
    ranks: dict[tuple[int, int], int] = {}
    for placement, size in zip(layout, mesh.shape, strict=True):
        if isinstance(placement, Shard) and placement.zigzag:
            place = placement.dim, placement.split
            ranks[place] = ranks.get(place, 1) * size
    return [(*place, size) for place, size in ranks.items()]


def local_runs(
    size: int, layout: Layout, dim: int, mesh: Mesh, coordinate: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """(start, length) of the runs of global indices along `dim` that a rank holds; one run unless strided. They ascend
    but for a dim in an order of its own, whose runs are in that of the block."""
    runs = [(0, size)]
    for split, axis in reversed(sharded_axes(layout, dim)):
        inner = [a for a in sharded_axes(layout, dim) if a[0] == split and a[1] < axis]
        if inner:
            continue  # the outermost axis of a split cuts for all axes that nest inside it
        start, length = 0, size // split if split > 1 else size
        for _, nested in [a for a in sharded_axes(layout, dim) if a[0] == split]:
            begin, length = chunk(length, mesh.shape[nested], coordinate[nested])
            start += begin
        block, placement = size // split, layout[axis]
        assert isinstance(placement, Shard)
        turned = block - start - length if placement.zigzag else start
        window = [(piece * block + (turned if piece % 2 else start), length) for piece in range(split)]
        runs = [overlap for run in runs for other in window if (overlap := _overlap(run, other))[1] > 0]
    return tuple(_in_order(sorted(runs), order_of(layout, dim)))


def order_of(layout: Layout, dim: int) -> tuple[int, ...]:
    """The order of its own in which a dim lies; empty where it lies as it is."""
    return next((p.order for p in layout if isinstance(p, Shard) and p.dim == dim), ())


def _in_order(runs: Sequence[tuple[int, int]], order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of positions as runs of the indices that lie there."""
    if not order:
        yield from runs
        return
    held = [order[at] for start, length in runs for at in range(start, start + length)]
    begins = [at for at, index in enumerate(held) if at == 0 or index != held[at - 1] + 1]
    for begin, end in pairwise([*begins, len(held)]):
        yield held[begin], end - begin


def in_order(layout: Layout, dim: int, order: tuple[int, ...]) -> Layout:
    """The layout with a dim in an order of its own."""
    return tuple(replace(p, order=order) if isinstance(p, Shard) and p.dim == dim else p for p in layout)


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    start = max(first[0], second[0])
    return start, min(first[0] + first[1], second[0] + second[1]) - start
