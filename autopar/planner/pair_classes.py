"""Classes of (source, target) pairs whose steps depend on sizes: uneven blocks, several factors of one dim.

`redistribution_steps` is asked for one representative of a class. On a (2, 2) mesh these two pairs are one class:

    (S(2), P) -> (R, S(2))     of a tensor of (8, 7, 31)
    (S(1), P) -> (R, S(1))     of a tensor of (4, 31)

Sizes and splits decide what is legal and what nests; they are kept up to what the mesh can tell apart (`plain_dim`).
`PairClasses.codes` numbers many pairs at once: every layout has a pattern, in which its dims are counted by first
appearance, and a pair has two patterns, per dim of the target the dim of the source that is the same, and the way that
is tried first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.layouts.placement import Layout, Partial, Placement, Shard
from autopar.passes.emit_redistribution import WAITING_ELEMENTS
from autopar.planner.general_routes import WAITING, WAITING_IN_FIRST, WAYS

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
Shape = tuple[int, ...]
Splits = Mapping[int, Sequence[int]]

_PATTERN_BITS = 20


@dataclass(frozen=True, slots=True)
class Factor:
    """How a class writes a Shard: a dim (any number that tells dims apart), is it the first, its size, the split."""

    dim: int
    is_first: bool
    size: int
    split: int


Factors = Mapping[Shard, Factor]


def plain_dim(dim: int, size: int, splits: Sequence[int], ranks: int) -> dict[Shard, Factor]:
    """The factors of a dim of `size` at ascending `splits`, on a mesh of `ranks`: equal for dims that move alike.

    Every question about a dim is whether a product of axes divides the ratio of two factors, or equals it. `ranks` is a
    multiple of all these products; where a dim has several factors `ranks` squared is, since an all_to_all between them
    counts an axis twice. A dim that does not divide stays as it is.
    """
    chain = [1, *(split for split in splits if split > 1), size]
    if size % ranks or any(inner % outer for outer, inner in pairwise(chain)):
        return {Shard(dim, split): Factor(dim, dim == 0, size, split) for split in splits}
    multiple = ranks if len(chain) == 2 else ranks**2
    plain = [1]
    for outer, inner in pairwise(chain):
        ratio = inner // outer
        divisor = math.gcd(ratio, multiple)
        plain.append(plain[-1] * (divisor if divisor == ratio else divisor * _stranger(ranks)))
    names = dict(zip(chain, plain, strict=True))
    shortest = plain[-2] * math.gcd(chain[-1] // chain[-2], multiple)
    return {Shard(dim, split): Factor(dim, dim == 0, shortest, names[split]) for split in splits}


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
class Pairs:
    """Some pairs of a table."""

    sources: Sequence[Layout]
    targets: Sequence[Layout]
    source: Integers
    """(pairs,) places in `sources`."""
    target: Integers
    """(pairs,) places in `targets`."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The representative of a class."""

    shape: Shape
    source: Layout
    target: Layout


class PairClasses:
    """The patterns of one mesh shape, numbered as they come."""

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        self._sizes = mesh_shape
        self._axes = len(mesh_shape)
        self._ranks = math.prod(mesh_shape)
        self._numbers: dict[Pattern, int] = {}
        self._patterns: list[Pattern] = []

    def codes(self, shape: Sequence[int], pairs: Pairs, ways: Integers) -> Integers:
        """(pairs,) codes: pairs with one code take the same steps and cost the same. ways: (pairs,) the way to
        try first, see `general_routes.py`: whether an axis may wait in a dim that neither layout cuts."""
        sources, source = _used(pairs.sources, pairs.source)
        targets, target = _used(pairs.targets, pairs.target)
        factors: dict[Shard, Factor] = {}
        for dim, found in _splits((*sources, *targets)).items():
            factors |= plain_dim(dim, shape[dim], found, self._ranks)
        source_numbers, source_dims = self._read(sources, factors)
        target_numbers, target_dims = self._read(targets, factors)
        source_dims, target_dims = source_dims[source], target_dims[target]
        codes = np.zeros(len(source), np.int64)
        for j in reversed(range(self._axes)):
            codes *= self._axes + 1
            for i in range(self._axes):
                same = source_dims[:, i] == target_dims[:, j]
                codes += (i + 1) * (same & (target_dims[:, j] >= 0))
        codes = codes << _PATTERN_BITS | source_numbers[source]
        codes = codes << _PATTERN_BITS | target_numbers[target]
        return codes * WAYS + ways

    def representative(self, code: int) -> Pair:
        """A pair of the class."""
        code, way = divmod(code, WAYS)
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
        if way in (WAITING_IN_FIRST, WAITING):
            _name_dim(sizes, way == WAITING_IN_FIRST, self._ranks * WAITING_ELEMENTS)
        shape = tuple(sizes[dim] for dim in range(len(sizes)))
        return Pair(shape, _renamed(source.layout, source_names), _renamed(target.layout, target_names))

    def _read(self, layouts: Sequence[Layout], factors: Factors) -> tuple[Integers, Integers]:
        """(layouts,) numbers of patterns; (layouts, axes) the dim of a factor behind each dim of a pattern, or -1."""
        numbers = np.empty(len(layouts), np.int64)
        dims = np.full((len(layouts), self._axes), -1, np.int64)
        for row, layout in enumerate(layouts):
            order: dict[int, int] = {}
            placements: list[Placement] = []
            seen: list[tuple[bool, int]] = []
            for placement in layout:
                if isinstance(placement, Shard):
                    factor = factors[placement]
                    if factor.dim not in order:
                        order[factor.dim] = len(order)
                        seen.append((factor.is_first, factor.size))
                    placements.append(Shard(order[factor.dim], factor.split))
                else:
                    placements.append(placement)
            numbers[row] = self._number(Pattern(tuple(placements), tuple(seen)))
            dims[row, : len(order)] = list(order)
        return numbers, dims

    def _number(self, pattern: Pattern) -> int:
        number = self._numbers.get(pattern)
        if number is None:
            number = self._numbers[pattern] = len(self._patterns)
            self._patterns.append(pattern)
            assert number < 1 << _PATTERN_BITS, "more layouts than codes have room for"
        return number


def _used(layouts: Sequence[Layout], places: Integers) -> tuple[list[Layout], Integers]:
    """The layouts at `places`, each once, and where each place finds its own there."""
    used, where = np.unique(places, return_inverse=True)
    return [layouts[place] for place in used.tolist()], where


def _splits(layouts: Sequence[Layout]) -> Splits:
    """Dim -> the splits at which some layout cuts it, ascending."""
    found: dict[int, set[int]] = {}
    for placement in {p for layout in layouts for p in layout}:
        if isinstance(placement, Shard):
            found.setdefault(placement.dim, set()).add(placement.split)
    return {dim: sorted(found[dim]) for dim in sorted(found)}


def are_reachable(sources: Sequence[Layout], targets: Sequence[Layout]) -> Booleans:
    """(sources, targets) `is_reachable`."""
    names: dict[Placement, int] = {}
    numbers = [
        np.array(
            [[names.setdefault(p, len(names) + 1) if isinstance(p, Partial) else 0 for p in row] for row in rows],
            np.int64,
        ).reshape(len(rows), -1)
        for rows in (sources, targets)
    ]
    reached = np.ones((len(sources), len(targets)), np.bool_)
    for before, after in zip(numbers[0].T, numbers[1].T, strict=True):
        reached &= (after[None, :] == 0) | (before[:, None] == after[None, :])
    return reached


def _name_dim(sizes: dict[int, int], is_first: bool, size: int) -> int:
    """The dim of the representative that stands for a dim of `size`; enters its size."""
    dim = 0 if is_first else len(sizes)
    sizes[dim] = size
    return dim


def _renamed(layout: Layout, names: Sequence[int]) -> Layout:
    return tuple(Shard(names[p.dim], p.split) if isinstance(p, Shard) else p for p in layout)
