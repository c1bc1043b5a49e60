"""Classes of (source, target) pairs: what a redistribution looks at, and nothing else.

Which collectives lead from one layout to another does not depend on the names of dims, nor on most of their sizes. On a
(2, 2) mesh these two pairs are one class:

    (S(1), R) -> (R, S(1))  of a tensor of (64, 4096)
    (S(2), R) -> (R, S(2))  of a tensor of (8, 16, 32)

A class keeps which axes share a factor of a dim, whether a dim is the first (blocks of dim 0 need no transposing copy),
and sizes and splits up to what a mesh can tell apart: `plain_dim` replaces the ratio of neighbouring factors by its
common divisor with the mesh, and leaves dims that do not divide as they are. `PairClasses.codes` numbers the pairs of a
whole table at once: every layout has a pattern, in which its dims are counted by first appearance, and a pair has two
patterns and, per dim of the target, the dim of the source that is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.layout import Layout, Placement, Shard

Integers = NDArray[np.int64]
Shape = tuple[int, ...]

_PATTERN_BITS = 20


@dataclass(frozen=True, slots=True)
class PlainDim:
    """A dim as a redistribution sees it: is it the first, a size, and what to write for each split."""

    is_first: bool
    size: int
    splits: tuple[tuple[int, int], ...]


def plain_dim(dim: int, size: int, splits: Sequence[int], ranks: int) -> PlainDim:
    """The dim `dim` of `size`, with ascending `splits`, on a mesh of `ranks`: the same for all that move alike.

    Every question about a dim is whether a product of axes divides the ratio of two factors, or equals it. `ranks`
    squared is a multiple of all products that are asked for (an all_to_all within one dim counts an axis twice).
    """
    chain = [1, *(split for split in splits if split > 1), size]
    if size % ranks or any(inner % outer for outer, inner in pairwise(chain)):
        return PlainDim(dim == 0, size, tuple((split, split) for split in splits))
    plain = [1]
    for outer, inner in pairwise(chain):
        ratio = inner // outer
        divisor = math.gcd(ratio, ranks**2)
        plain.append(plain[-1] * (divisor if divisor == ratio else divisor * _stranger(ranks)))
    names = dict(zip(chain, plain, strict=True))
    return PlainDim(dim == 0, plain[-1], tuple((split, names[split]) for split in splits))


def _stranger(ranks: int) -> int:
    """The smallest number above 1 without a common divisor with `ranks`: no product of axes contains it."""
    return next(number for number in range(2, ranks + 2) if math.gcd(number, ranks) == 1)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A layout whose dims are counted by first appearance: per axis a Shard of such a dim, Replicate or Partial."""

    layout: Layout
    dims: tuple[tuple[bool, int], ...]
    """(is first, size) of every dim."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The representative of a class."""

    shape: Shape
    source: Layout
    target: Layout


class PairClasses:
    """The patterns of one mesh shape, numbered as they come."""

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        self._axes = len(mesh_shape)
        self._ranks = math.prod(mesh_shape)
        self._numbers: dict[Pattern, int] = {}
        self._patterns: list[Pattern] = []

    def codes(self, shape: Sequence[int], sources: Sequence[Layout], targets: Sequence[Layout]) -> Integers:
        """(sources, targets) codes; pairs with one code take the same steps and cost the same per byte."""
        dims = self._plain_dims(shape, (*sources, *targets))
        source_numbers, source_dims = self._read(sources, dims)
        target_numbers, target_dims = self._read(targets, dims)
        relation = np.zeros((len(sources), len(targets)), np.int64)
        for j in reversed(range(self._axes)):
            relation *= self._axes + 1
            for i in range(self._axes):
                same = source_dims[:, i, None] == target_dims[None, :, j]
                relation += (i + 1) * (same & (target_dims[None, :, j] >= 0))
        relation <<= 2 * _PATTERN_BITS
        return relation | source_numbers[:, None] << _PATTERN_BITS | target_numbers[None, :]

    def representative(self, code: int) -> Pair:
        """A pair of the class."""
        mask = (1 << _PATTERN_BITS) - 1
        source = self._patterns[code >> _PATTERN_BITS & mask]
        target = self._patterns[code & mask]
        relation = code >> 2 * _PATTERN_BITS
        sizes = {0: 1}
        source_names = [_name_dim(sizes, *dim) for dim in source.dims]
        target_names = []
        for dim in target.dims:
            relation, same = divmod(relation, self._axes + 1)
            target_names.append(source_names[same - 1] if same else _name_dim(sizes, *dim))
        shape = tuple(sizes[dim] for dim in range(len(sizes)))
        return Pair(shape, _renamed(source.layout, source_names), _renamed(target.layout, target_names))

    def _plain_dims(self, shape: Sequence[int], layouts: Sequence[Layout]) -> dict[int, PlainDim]:
        splits: dict[int, set[int]] = {}
        for placement in {p for layout in layouts for p in layout}:
            if isinstance(placement, Shard):
                splits.setdefault(placement.dim, set()).add(placement.split)
        return {dim: plain_dim(dim, shape[dim], sorted(found), self._ranks) for dim, found in splits.items()}

    def _read(self, layouts: Sequence[Layout], dims: dict[int, PlainDim]) -> tuple[Integers, Integers]:
        """(layouts,) numbers of patterns; (layouts, axes) the dim of the tensor behind each dim of a pattern, or -1."""
        shards = {Shard(dim, split): (dim, plain) for dim, found in dims.items() for split, plain in found.splits}
        numbers = np.empty(len(layouts), np.int64)
        own_dims = np.full((len(layouts), self._axes), -1, np.int64)
        for row, layout in enumerate(layouts):
            order: dict[int, int] = {}
            placements: list[Placement] = []
            for placement in layout:
                if isinstance(placement, Shard):
                    dim, split = shards[placement]
                    placements.append(Shard(order.setdefault(dim, len(order)), split))
                else:
                    placements.append(placement)
            pattern = Pattern(tuple(placements), tuple((dims[dim].is_first, dims[dim].size) for dim in order))
            numbers[row] = self._number(pattern)
            own_dims[row, : len(order)] = list(order)
        return numbers, own_dims

    def _number(self, pattern: Pattern) -> int:
        number = self._numbers.get(pattern)
        if number is None:
            number = self._numbers[pattern] = len(self._patterns)
            self._patterns.append(pattern)
            assert number < 1 << _PATTERN_BITS, "more layouts than codes have room for"
        return number


def _name_dim(sizes: dict[int, int], is_first: bool, size: int) -> int:
    """The dim of the representative that stands for a dim of `size`; enters its size."""
    dim = 0 if is_first else len(sizes)
    sizes[dim] = size
    return dim


def _renamed(layout: Layout, names: Sequence[int]) -> Layout:
    return tuple(Shard(names[p.dim], p.split) if isinstance(p, Shard) else p for p in layout)
