"""General routes: the steps between two layouts where sizes decide nothing, found once for all meshes of so many axes.

While blocks divide evenly, the steps depend only on which axes share a factor (a dim and a split):

    (S(0), S(1)) -> (S(1), S(0))   on (2, 2), on (4, 16), of (64, 64), of (8, 4096): one general route

Every factor is written as a label, counted by first appearance in the source, then in the target; a code is a number
with the digits of both ends. What sizes have to allow is kept beside the route (`Cuts`): per factor the sets of axes
that ever cut it at once, as bits: bit m stands for the set of axes m. `fits.py` compares them with the dims.

A pair has up to three ways, tried in this order (`redistribution_steps`): over an axis that waits in a spare dim,
straight, and over the layout that both ends share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autopar.layout import Layout, Partial, Placement, Replicate, Shard
from autopar.planner.route_table import PlainStep, route_table
from autopar.redistribute import Step, redistribution

Bits = NDArray[np.uint32]
Integers = NDArray[np.int64]

WAITING, STRAIGHT, OVER_COMMON = range(3)
"""The ways of a pair."""

MOST_AXES = 5
"""Codes of pairs on more axes do not fit into 64 bits."""

_OPERATIONS = ("sum", "max", "min")


class Ends:
    """The layouts at one end of a table of pairs, read into arrays. shards: all factors that the table cuts."""

    def __init__(self, layouts: Sequence[Layout], shards: Sequence[Shard], num_axes: int) -> None:
        numbers: dict[Placement, int] = {Partial(op): -2 - index for index, op in enumerate(_OPERATIONS)}
        numbers |= {shard: number for number, shard in enumerate(shards)} | {Replicate(): -1}
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


def pair_codes(sources: Ends, targets: Ends, num_axes: int) -> Integers:
    """(sources, targets) codes, still without the way."""
    codes = sources.pattern[:, None] * _base(num_axes) ** num_axes + targets.pattern[None, :]
    for label in range(num_axes):
        same = (sources.label_of + 1) % (num_axes + 1)
        codes = codes * (num_axes + 1) + same[:, targets.factor_of[:, label]]
    return np.asarray((codes * (num_axes + 1) + sources.first[:, None]) * (num_axes + 1) + targets.first[None, :])


@dataclass(frozen=True, slots=True)
class Cuts:
    """The sets of axes that cut the factors of paths: (paths, labels) or (paths, labels, labels) bits of bits.

    A factor of the source has its label there; one of the target alone has its label there plus the number of axes; the
    last label stands for factors that are not cut.
    """

    alone: Bits
    """In some state."""
    together: Bits
    """In some state that cuts the other factor too."""
    across: Bits
    """On one side of an all_to_all whose other side cuts the other factor."""

    @classmethod
    def nothing(cls, labels: int) -> Cuts:
        """The cuts of one path that cuts nothing."""
        square = (1, labels, labels)
        return cls(np.zeros((1, labels), np.uint32), np.zeros(square, np.uint32), np.zeros(square, np.uint32))


@dataclass(frozen=True, slots=True)
class _Pair:
    """A decoded pair: every factor is a dim of its own; the spare one is the last number."""

    source: Layout
    target: Layout
    source_labels: tuple[int, ...]
    """Dims of the labels of the source, in front of those of the target."""
    target_labels: tuple[int, ...]


class GeneralRoutes:
    """Routes by the codes of their pairs and ways."""

    def __init__(self, num_axes: int) -> None:
        self._axes = num_axes
        self._table = route_table(num_axes)
        self._codes = np.empty(0, np.int64)
        self._entries = np.empty((0, 2), np.int64)
        self._path_of: dict[int, int] = {}
        self._paths: list[tuple[_Pair, tuple[Step, ...]]] = []
        self._cuts: list[Cuts] = []

    def entries(self, codes: Integers, ways: Integers) -> tuple[Integers, Integers]:
        """(pairs,) numbers of the routes, and where their cuts are found."""
        distinct, where = np.unique(codes * 3 + ways, return_inverse=True)
        places = np.searchsorted(self._codes, distinct)
        known = np.append(self._codes, -1)[places] == distinct
        if not known.all():
            new = distinct[~known]
            found = np.array([self._entry(code) for code in new.tolist()], np.int64)
            order = np.argsort(merged := np.concatenate([self._codes, new]), kind="stable")
            self._codes = merged[order]
            self._entries = np.concatenate([self._entries, found])[order]
            places = np.searchsorted(self._codes, distinct)
        routes, paths = self._entries[places].T
        return routes[where], paths[where]

    def cuts(self) -> Cuts:
        """The cuts of all paths, stacked."""
        if len(self._cuts) > 1:
            self._cuts = [Cuts(*(np.concatenate(parts) for parts in zip(*map(astuple, self._cuts), strict=True)))]
        return self._cuts[0]

    def _entry(self, code: int) -> tuple[int, int]:
        code, way = divmod(code, 3)
        path, firsts = divmod(code, (self._axes + 1) ** 2)
        key = path * 3 + way
        if key not in self._path_of:
            self._path_of[key] = len(self._paths)
            self._paths.append(self._find(path, way))
        pair, steps = self._paths[self._path_of[key]]
        first = _first(pair, *divmod(firsts, self._axes + 1))
        plain = [PlainStep.of(step, bool(step.moved - {first})) for step in steps]
        changes = sum(a != b for a, b in zip(pair.source, pair.target, strict=True))
        return self._table.number(plain, changes), self._path_of[key]

    def _find(self, path: int, way: int) -> tuple[_Pair, tuple[Step, ...]]:
        pair = self._decode(path)
        ones = (1,) * self._axes
        steps: tuple[Step, ...]
        if way == OVER_COMMON:
            common = tuple(a if a == b else Replicate() for a, b in zip(pair.source, pair.target, strict=True))
            steps = (*redistribution(pair.source, common, ones), *redistribution(common, pair.target, ones))
        else:
            spare = Shard(2 * self._axes) if way == WAITING else None
            steps = redistribution(pair.source, pair.target, ones, spare=spare)
        self._cuts.append(_cuts(pair.source, steps, 2 * self._axes))
        return pair, steps

    def _decode(self, code: int) -> _Pair:
        relation: list[int] = []
        for _ in range(self._axes):
            code, same = divmod(code, self._axes + 1)
            relation.insert(0, same - 1)
        ends: list[list[int]] = []
        for _ in range(2):
            digits: list[int] = []
            for _ in range(self._axes):
                code, digit = divmod(code, _base(self._axes))
                digits.insert(0, digit)
            ends.insert(0, digits)
        labels = [max((digit - len(_OPERATIONS) for digit in end), default=0) for end in ends]
        source_labels = tuple(range(max(labels[0], 0)))
        target_labels = tuple(
            same if same >= 0 else self._axes + label for label, same in enumerate(relation[: max(labels[1], 0)])
        )
        return _Pair(_layout(ends[0], source_labels), _layout(ends[1], target_labels), source_labels, target_labels)


def _layout(digits: Sequence[int], dims: Sequence[int]) -> Layout:
    operations: list[Placement] = [Replicate(), *map(Partial, _OPERATIONS)]
    return tuple(
        operations[digit] if digit < len(operations) else Shard(dims[digit - len(operations)]) for digit in digits
    )


def _first(pair: _Pair, source_first: int, target_first: int) -> Shard | None:
    """The dim of a pair that stands for the plain first dim."""
    if source_first:
        return Shard(pair.source_labels[source_first - 1])
    return Shard(pair.target_labels[target_first - 1]) if target_first else None


def _cuts(source: Layout, steps: Sequence[Step], num_dims: int) -> Cuts:
    """The cuts of one path. The last dim, in which an axis may wait, always has room."""
    cuts = Cuts.nothing(num_dims + 1)
    states = [_masks(layout, num_dims) for layout in (source, *(step.after for step in steps))]
    for state in states:
        for dim, axes in state.items():
            cuts.alone[0, dim] |= 1 << axes
            for other in state:
                cuts.together[0, dim, other] |= 1 << axes
    for step, before, after in zip(steps, states, states[1:], strict=False):
        if step.kind == "all_to_all":
            for dim, axes in before.items():
                for other in after:
                    cuts.across[0, dim, other] |= 1 << axes
            for dim, axes in after.items():
                for other in before:
                    cuts.across[0, dim, other] |= 1 << axes
    return cuts


def _masks(layout: Layout, num_dims: int) -> dict[int, int]:
    """Dim -> the axes that cut it, as bits."""
    found: dict[int, int] = {}
    for axis, placement in enumerate(layout):
        if isinstance(placement, Shard) and placement.dim < num_dims:
            found[placement.dim] = found.get(placement.dim, 0) | 1 << axis
    return found


@cache
def general_routes(num_axes: int) -> GeneralRoutes:
    """The general routes over meshes of `num_axes`, shared by all of them in one process."""
    return GeneralRoutes(num_axes)
