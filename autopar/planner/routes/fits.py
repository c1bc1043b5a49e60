"""Fits: whether the dims of a tensor have room for what a general route does to them on one mesh.

    8 heads on (4, 8, 8)      axis 0 divides them, and so does axis 1; {0, 1} together break them: no rank may be empty
    (2, 512) as one dim       axis 0 of size 4 divides the dim, but not while another axis cuts behind the 2

A route fits where every set of axes that cuts a factor divides it, up to the next factor that is cut at the same time:
then all blocks are even. It is broken where one of its layouts is illegal, or where an all_to_all within a dim cuts
what it joins; the next way is tried then. In between lie uneven blocks and changes of spelling only, which general
routes do not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from autopar.layouts.placement import Mesh, Replicate, Shard, is_legal
from autopar.planner.routes.general_routes import Cuts
from autopar.planner.routes.pair_codes import PairEnds

Booleans = NDArray[np.bool_]
Integers = NDArray[np.int64]

_ALL = 2**32 - 1


class Fits:
    """The sets of axes of one mesh shape that fit, as bits: bit m stands for the set of axes m."""

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        self.mesh = Mesh(tuple(map(str, range(len(mesh_shape)))), mesh_shape)
        self._products = [1]
        for size in mesh_shape:
            self._products += [product * size for product in self._products]
        self.not_dividing = cache(self._not_dividing)
        self.filling = cache(self._filling)
        self.breaking = cache(self._breaking)

    def _not_dividing(self, size: int) -> int:
        return _bits(size % product != 0 for product in self._products)

    def _filling(self, size: int) -> int:
        """The sets that leave nothing of `size`; also, on a mesh with axes of size 1, what touches by them."""
        return _bits(size == product for product in self._products)

    def _breaking(self, size: int, split: int) -> int:
        """The sets that cut a factor of a dim of `size` illegally, whatever else cuts the dim."""
        axes = range(len(self.mesh.shape))
        layouts = (
            tuple(Shard(0, split) if chosen >> axis & 1 else Replicate() for axis in axes)
            for chosen in range(len(self._products))
        )
        return _bits(not is_legal((size,), layout, self.mesh) for layout in layouts)


def _bits(answers: Iterable[bool]) -> int:
    return sum(1 << number for number, answer in enumerate(answers) if answer)


class PairFits:
    """The checks of one table of pairs; shards: the factors that it cuts, ascending."""

    def __init__(
        self,
        fits: Fits,
        shape: Sequence[int],
        shards: Sequence[Shard],
        ends: tuple[PairEnds, PairEnds],
    ) -> None:
        self._fits, self._shape, self._shards, self._ends = fits, shape, shards, ends

    def are_plain(self) -> Booleans:
        """(sources, targets) whether both ends cut evenly and are spelled in the one way that general routes know."""
        plain = [_are_plain(self._shape, self._shards, ends, self._fits.mesh.shape) for ends in self._ends]
        return np.asarray(plain[0][:, None] & plain[1][None, :])

    def verdicts(self, source: Integers, target: Integers, paths: Integers, cuts: Cuts) -> tuple[Booleans, Booleans]:
        """(pairs,) whether everything fits, and whether something breaks."""
        doubtful = np.zeros(len(paths), np.bool_)
        broken = np.zeros(len(paths), np.bool_)
        for number, shard in enumerate(self._shards):
            size = self._shape[shard.dim]
            not_dividing = self._fits.not_dividing(size // shard.split)
            if not_dividing:
                sets = cuts.alone[paths, self._label(number, source, target)]
                broken |= (sets & self._fits.breaking(size, shard.split)) != 0
                doubtful |= (sets & not_dividing) != 0
        for dim in range(len(self._shape)):
            self._check_dim(dim, source, target, paths, cuts, doubtful, broken)
        return ~(doubtful | broken), broken

    def _check_dim(
        self,
        dim: int,
        source: Integers,
        target: Integers,
        paths: Integers,
        cuts: Cuts,
        doubtful: Booleans,
        broken: Booleans,
    ) -> None:
        """What several factors of one dim do to each other."""
        overlaps = np.zeros(len(paths), np.bool_)
        touches = np.zeros(len(paths), np.bool_)
        numbers = [number for number, shard in enumerate(self._shards) if shard.dim == dim]
        for outer, inner in combinations(numbers, 2):
            room, rest = divmod(self._shards[inner].split, self._shards[outer].split)
            not_dividing = _ALL if rest else self._fits.not_dividing(room)
            place = paths, self._label(outer, source, target), self._label(inner, source, target)
            together = cuts.together[place]
            broken |= (together & not_dividing) != 0
            overlaps |= (cuts.across[place] & not_dividing) != 0
            touches |= (together & self._fits.filling(room)) != 0
        if 1 in self._fits.mesh.shape:
            doubtful |= touches
        doubtful |= overlaps & touches
        broken |= overlaps & ~touches

    def _label(self, number: int, source: Integers, target: Integers) -> Integers:
        num_axes = len(self._fits.mesh.shape)
        in_source = self._ends[0].label_of[source, number]
        in_target = self._ends[1].label_of[target, number]
        return np.asarray(np.where(in_source < num_axes, in_source, num_axes + in_target))


def _are_plain(shape: Sequence[int], shards: Sequence[Shard], ends: PairEnds, mesh_shape: tuple[int, ...]) -> Booleans:
    """(layouts,) whether all blocks are even and nothing could be spelled otherwise; pieces of blocks in zigzag order
    go in pairs, which general routes do not know."""
    sizes = np.array(mesh_shape)
    products = [np.where(ends.cut == number, sizes, 1).prod(axis=1) for number in range(len(shards))]
    zigzag = [number for number, shard in enumerate(shards) if shard.zigzag]
    plain = ~np.isin(ends.cut, zigzag).any(axis=1)
    for dim, size in enumerate(shape):
        numbers = [number for number, shard in enumerate(shards) if shard.dim == dim]
        if numbers:
            last = np.max([np.where(products[n] > 1, shards[n].split * products[n], 1) for n in numbers], axis=0)
            plain &= (size % last == 0) & (size % np.prod([products[number] for number in numbers], axis=0) == 0)
        for outer, inner in combinations(numbers, 2):
            touch = products[outer] * shards[outer].split >= shards[inner].split
            plain &= ~(touch & _nests(ends.cut == outer, ends.cut == inner, 1 in mesh_shape))
    return np.asarray(plain)


def _nests(outer: Booleans, inner: Booleans, in_any_order: bool) -> Booleans:
    """(layouts,) whether the axes of the inner factor come behind those of the outer one; both (layouts, axes)."""
    both = outer.any(axis=1) & inner.any(axis=1)
    last = outer.shape[1] - 1 - outer[:, ::-1].argmax(axis=1)
    return np.asarray(both & (in_any_order | (inner.argmax(axis=1) > last)))
