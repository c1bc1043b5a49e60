"""Codes of pairs: two layouts as one number, in which factors (a dim and a split) have no names.

    (S(1), R) -> (R, S(1))             of (64, 4096)      one code: axis 0 leaves a factor that axis 1 enters
    (S(2, 4), R) -> (R, S(2, 4))       of (8, 16, 32)

Factors become labels, counted by first appearance in their layout. The digits of a code say what every axis holds in
the source and in the target, which labels of the target are which of the source, and which label is the plain first
dim, whose blocks need no transposing copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.layouts.placement import Layout, Partial, Placement, Replicate, Shard

Integers = NDArray[np.int64]

MOST_AXES = 5
"""Codes of pairs on more axes do not fit into 64 bits."""

_OPERATIONS = ("sum", "max", "min")


class PairEnds:
    """The layouts at one end of a table of pairs, read into arrays. shards: all factors that the table cuts."""

    def __init__(self, layouts: Sequence[Layout], shards: Sequence[Shard], num_axes: int) -> None:
        numbers: dict[Placement, int] = {Partial(op): -2 - index for index, op in enumerate(_OPERATIONS)}
        numbers[Replicate()] = -1
        numbers.update((shard, number) for number, shard in enumerate(shards))
        self.cut = np.array([[numbers[p] for p in layout] for layout in layouts], np.int64).reshape(-1, num_axes)
        """(layouts, axes) the number of the factor that an axis cuts; below 0 it cuts none."""
        self.label_of = np.full((len(layouts), len(shards) + 1), num_axes, np.int64)
        """(layouts, factors) the label of a factor, `num_axes` where it is not cut (always so in the last column)."""
        self.factor_of = np.full((len(layouts), num_axes), len(shards), np.int64)
        """(layouts, labels) the factor behind a label; one past the last where there are fewer."""
        self.pattern = np.zeros(len(layouts), np.int64)
        """(layouts,) digits of the axes."""
        self._label(num_axes)
        first = numbers.get(Shard(0), len(shards))
        self.first = (self.label_of[:, first] + 1) % (num_axes + 1)
        """(layouts,) one more than the label of the plain first dim, 0 where it is not cut."""

    def _label(self, num_axes: int) -> None:
        rows = np.arange(len(self.cut))
        count = np.zeros(len(self.cut), np.int64)
        for axis in range(num_axes):
            is_cut = self.cut[:, axis] >= 0
            factor = np.maximum(self.cut[:, axis], 0)
            is_new = is_cut & (self.label_of[rows, factor] == num_axes)
            self.label_of[rows[is_new], factor[is_new]] = count[is_new]
            self.factor_of[rows[is_new], count[is_new]] = factor[is_new]
            count += is_new
            digit = np.where(is_cut, self.label_of[rows, factor] + 1 + len(_OPERATIONS), -1 - self.cut[:, axis])
            self.pattern = self.pattern * _base(num_axes) + digit


def _base(num_axes: int) -> int:
    """Digits of one axis: R, three reductions, labels."""
    return 1 + len(_OPERATIONS) + num_axes


def encode(sources: PairEnds, targets: PairEnds, num_axes: int) -> Integers:
    """(sources, targets) codes."""
    codes = sources.pattern[:, None] * _base(num_axes) ** num_axes + targets.pattern[None, :]
    for label in range(num_axes):
        same = (sources.label_of + 1) % (num_axes + 1)
        codes = codes * (num_axes + 1) + same[:, targets.factor_of[:, label]]
    return np.asarray((codes * (num_axes + 1) + sources.first[:, None]) * (num_axes + 1) + targets.first[None, :])


@dataclass(frozen=True, slots=True)
class Decoded:
    """Pairs as numbers of `moves.py`: a factor of the source has its label there, one of the target alone its label
    there plus the number of axes."""

    sources: Integers
    """(pairs, axes)"""
    targets: Integers
    """(pairs, axes)"""
    first: Integers
    """(pairs,) the plain first dim, -1 where neither end cuts it."""


def decode(codes: Integers, num_axes: int) -> Decoded:
    """Inverse of `encode`, up to the names of factors."""
    codes, (first,) = _digits(codes, num_axes + 1, 1)
    codes, (source_first,) = _digits(codes, num_axes + 1, 1)
    codes, same = _digits(codes, num_axes + 1, num_axes)
    codes, target = _digits(codes, _base(num_axes), num_axes)
    codes, source = _digits(codes, _base(num_axes), num_axes)
    names = np.where(same > 0, same - 1, num_axes + np.arange(num_axes)[:, None])
    labels = np.maximum(target - 1 - len(_OPERATIONS), 0)
    is_cut = target > len(_OPERATIONS)
    return Decoded(
        sources=np.where(source > len(_OPERATIONS), source - 1 - len(_OPERATIONS), -1 - source).T,
        targets=np.where(is_cut, np.take_along_axis(names, labels, axis=0), -1 - target).T,
        first=np.where(source_first > 0, source_first, np.where(first > 0, first + num_axes, 0)) - 1,
    )


def _digits(codes: Integers, base: int, count: int) -> tuple[Integers, Integers]:
    """What is left of the codes, and their last digits: (count, pairs)."""
    digits = np.empty((count, len(codes)), np.int64)
    for place in reversed(range(count)):
        codes, digits[place] = np.divmod(codes, base)
    return codes, digits


def without_first(codes: Integers, num_axes: int) -> Integers:
    """The codes of the pairs whatever their first dim is."""
    return codes // (num_axes + 1) ** 2
