"""Halos: a rank that holds a block of rows gets the rows around it that its part of the output needs.

    extended = extend(x): edges(x) -> all_to_all_single with the readers of these rows -> [fill, left, own, right, fill]
    gradient = fold(gradient of extended): edges go back to their owners, who add them

Which rows go where follows from the blocks alone, so uneven blocks and windows wider than a block need no special case.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from autopar.layouts.placement import Layout, chunk, sharded_axes
from autopar.ops import halo as ops
from autopar.passes.implementations.local_context import LocalContext

_c10d = torch.ops._c10d_functional
Run = tuple[int, int]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Halo:
    """Who holds and who needs which rows along one dim, in the order of the group over `axes`.

    size: rows of the whole dim. blocks: (start, length) that each rank holds. windows: (start, length) that each rank
    needs; rows outside of 0 .. size are padding. position: this rank.
    """

    dim: int
    size: int
    axes: tuple[int, ...]
    blocks: tuple[Run, ...]
    windows: tuple[Run, ...]
    position: int

    @property
    def block(self) -> Run:
        """The rows that this rank owns."""
        return self.blocks[self.position]

    @property
    def window(self) -> Run:
        """The rows that this rank reads."""
        return self.windows[self.position]

    @property
    def exchanges(self) -> bool:
        """Whether any rank borrows rows."""
        ranks = range(len(self.blocks))
        return any(self.borrowed(reader, holder)[1] for reader in ranks for holder in ranks)

    @property
    def own(self) -> Run:
        """The part of the own block that lies in the own window."""
        return _overlap(self.window, self.block)

    def borrowed(self, reader: int, holder: int) -> Run:
        """Rows that `reader` gets from `holder`."""
        return (0, 0) if reader == holder else _overlap(self.windows[reader], self.blocks[holder])

    def lent(self) -> list[Run]:
        """Per reader, the rows of the own block that it gets, counted from the start of the block."""
        return [_from(self.block[0], self.borrowed(reader, self.position)) for reader in range(len(self.blocks))]

    def taken(self) -> list[Run]:
        """Per holder, the rows that this rank gets, counted from the start of its window."""
        return [_from(self.window[0], self.borrowed(self.position, holder)) for holder in range(len(self.blocks))]


def halo_along(
    context: LocalContext,
    name: str,
    held: tuple[Layout, int, int],
    produced: tuple[Layout, int, int],
    window: Callable[[int, int], Run],
) -> Halo:
    """The halo of a dim that `name` splits.

    held, produced: (layout, dim, size) of the tensor whose rows are exchanged and of the one made from them.
    window(start, length): rows of the first that a block of the second needs.
    """
    axes = context.axes_of(frozenset({name}))
    coordinates = list(itertools.product(*(range(context.mesh.shape[axis]) for axis in axes)))
    produced_blocks = [_block(context, produced, axes, coordinate) for coordinate in coordinates]
    return Halo(
        dim=held[1],
        size=held[2],
        axes=axes,
        blocks=tuple(_block(context, held, axes, coordinate) for coordinate in coordinates),
        windows=tuple(window(*block) for block in produced_blocks),
        position=coordinates.index(tuple(context.coordinate[axis] for axis in axes)),
    )


def extend(
    context: LocalContext, x: fx.Node, shape: Shape, dtype: torch.dtype, halo: Halo, value: float = 0.0
) -> tuple[fx.Node, Shape]:
    """(the window of this rank, its local shape); x: the block, of local `shape`; `value` fills the padding."""
    borrowed = None
    if halo.exchanges:
        borrowed = _exchange(context, x, shape, dtype, halo, halo.lent(), halo.taken())
    num_before = sum(length for _, length in halo.taken()[: halo.position])
    start, length = halo.window
    fill = (min(length, max(0, -start)), min(length, max(0, start + length - halo.size)))
    own = _from(halo.block[0], halo.own)
    grown = (*shape[: halo.dim], length, *shape[halo.dim + 1 :])
    node = context.call(ops.extended, x, borrowed, halo.dim, num_before, own, fill, value)
    return context.describe(node, grown, dtype), grown


def fold(
    context: LocalContext, gradient: fx.Node, shape: Shape, dtype: torch.dtype, halo: Halo
) -> tuple[fx.Node, Shape]:
    """(gradient of the block, its local shape) from that of the window, of local `shape`."""
    returned, runs = None, halo.lent()
    if halo.exchanges:
        returned = _exchange(context, gradient, shape, dtype, halo, halo.taken(), runs)
    start, size = halo.block
    own, at = _from(halo.window[0], halo.own), halo.own[0] - start
    shrunk = (*shape[: halo.dim], size, *shape[halo.dim + 1 :])
    node = context.call(ops.folded, gradient, returned, halo.dim, own, at, size, runs)
    return context.describe(node, shrunk, dtype), shrunk


def _exchange(
    context: LocalContext, x: fx.Node, shape: Shape, dtype: torch.dtype, halo: Halo, sent: list[Run], got: list[Run]
) -> fx.Node:
    """Rows `sent` of x to every rank of the group; gives the rows that the others sent, in the order of the group."""
    row = (*shape[: halo.dim], *shape[halo.dim + 1 :])
    sizes, received = [length for _, length in sent], [length for _, length in got]
    rows = context.describe(context.call(ops.edges, x, halo.dim, sent), (sum(sizes), *row), dtype)
    return context.all_to_all(rows, received, sizes, halo.axes)


def _block(context: LocalContext, held: tuple[Layout, int, int], axes: tuple[int, ...], at: tuple[int, ...]) -> Run:
    """(start, length) of the block of the rank whose coordinates on `axes` are `at`."""
    layout, dim, size = held
    coordinate = list(context.coordinate)
    for axis, position in zip(axes, at, strict=True):
        coordinate[axis] = position
    start, length = 0, size
    for split, axis in sharded_axes(layout, dim):
        assert split == 1, "rows with a halo are one range"
        begin, length = chunk(length, context.mesh.shape[axis], coordinate[axis])
        start += begin
    return start, length


def _overlap(first: Run, second: Run) -> Run:
    start, end = max(first[0], second[0]), min(first[0] + first[1], second[0] + second[1])
    return (start, end - start) if end > start else (start, 0)


def _from(origin: int, run: Run) -> Run:
    """The run counted from `origin`; an empty one begins at 0."""
    return (run[0] - origin, run[1]) if run[1] else (0, 0)
