"""General routes: the steps between two layouts where sizes decide nothing, found once for all meshes of so many axes.

While blocks divide evenly, the steps depend only on which axes share a factor:

    (S(0), S(1)) -> (S(1), S(0))   on (2, 2), on (4, 16), of (64, 64), of (8, 4096): one general route

What sizes have to allow is kept beside the route (`Cuts`): per factor the sets of axes that ever cut it at once, as
bits: bit m stands for the set of axes m. `fits.py` compares them with the dims; where they do not fit, the next way of
the pair (`moves.Way`) is tried, as `redistribution_steps` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autopar.layouts.moves import BUFFER_BEHIND, ORDER, Move, State, Way, moves_on
from autopar.planner.routes.growing import Growing
from autopar.planner.routes.pair_codes import Decoded, decode, without_first
from autopar.planner.routes.route_table import MOST_STEPS, route_table, step_codes

Bits = NDArray[np.uint32]
Integers = NDArray[np.int64]

WAITING_IN_FIRST = len(Way)
"""`Way.WAITING` in a spare dim that is the first one, whose blocks need no transposing copy."""
NEXT_WAY = np.array([Way.STRAIGHT, Way.OVER_COMMON, Way.OVER_COMMON, Way.STRAIGHT])
_WAYS = len(NEXT_WAY)
_BUFFER_BEHIND = [ORDER.index(kind) for kind in BUFFER_BEHIND]


@dataclass(frozen=True, slots=True)
class Cuts:
    """The sets of axes that cut the factors of paths: (paths, labels) or (paths, labels, labels) bits of bits.

    Labels are those of `pair_codes.Decoded`; the last one stands for factors that are not cut.
    """

    alone: Bits
    """In some state."""
    together: Bits
    """In some state that cuts the other factor too."""
    across: Bits
    """On one side of an all_to_all whose other side cuts the other factor."""


@dataclass(frozen=True, slots=True)
class _Paths:
    """What happens on some paths, as arrays; behind its last step a path stands still."""

    states: Integers
    """(paths, steps + 1, axes)"""
    kinds: Integers
    """(paths, steps) places in `ORDER`, -1 behind the last step."""

    @classmethod
    def of(cls, sources: list[State], moves: list[tuple[Move, ...]]) -> _Paths:
        most = max(map(len, moves))
        kinds = [[ORDER.index(move.kind) for move in path] + [-1] * (most - len(path)) for path in moves]
        states = [
            [source, *(move.after for move in path), *[path[-1].after if path else source] * (most - len(path))]
            for source, path in zip(sources, moves, strict=True)
        ]
        return cls(np.array(states, np.int64), np.array(kinds, np.int64).reshape(len(moves), most))


class GeneralRoutes:
    """The routes over meshes of so many axes, by the codes of their pairs and by ways."""

    def __init__(self, num_axes: int) -> None:
        self._axes = num_axes
        self._table = route_table(num_axes)
        self._spare = 2 * num_axes
        self._codes = np.empty(0, np.int64)
        self._entries = np.empty((0, 2), np.int64)
        self._path_of: dict[int, int] = {}
        self._steps: Growing[np.int64] = Growing((MOST_STEPS * num_axes,), np.int64)
        self._moved: Growing[np.int64] = Growing((MOST_STEPS * num_axes,), np.int64)
        labels = 2 * num_axes + 1
        self._alone: Growing[np.uint32] = Growing((labels,), np.uint32)
        self._together: Growing[np.uint32] = Growing((labels, labels), np.uint32)
        self._across: Growing[np.uint32] = Growing((labels, labels), np.uint32)

    def __len__(self) -> int:
        return len(self._codes)

    def entries(self, codes: Integers, ways: Integers) -> tuple[Integers, Integers]:
        """(pairs,) numbers of the routes, and where their cuts are found."""
        distinct, where = np.unique(codes * _WAYS + ways, return_inverse=True)
        places: Integers = np.atleast_1d(np.searchsorted(self._codes, distinct))
        known = np.asarray(np.append(self._codes, -1)[places] == distinct)
        if not known.all():
            found = self._find(distinct[~known])
            self._codes = np.insert(self._codes, places[~known], distinct[~known])
            self._entries = np.insert(self._entries, places[~known], found, axis=0)
            places = np.atleast_1d(np.searchsorted(self._codes, distinct))
        routes, paths = self._entries[places].T
        return routes[where], paths[where]

    @property
    def cuts(self) -> Cuts:
        """The cuts of all paths so far."""
        return Cuts(self._alone.rows, self._together.rows, self._across.rows)

    def _find(self, keys: Integers) -> Integers:
        """(keys, 2) routes and paths of new keys."""
        codes, ways = np.divmod(keys, _WAYS)
        pairs = decode(codes, self._axes)
        in_first = ways == WAITING_IN_FIRST
        paths = self._paths(without_first(codes, self._axes), np.where(in_first, Way.WAITING, ways), pairs)
        steps, moved = self._steps.rows[paths], self._moved.rows[paths]
        first = np.where(in_first, self._spare, pairs.first)
        strided = moved & ~np.where(first >= 0, 1 << np.maximum(first, 0), 0)[:, None]
        changes = (pairs.sources != pairs.targets) @ (1 << np.arange(self._axes))
        routes = self._table.numbers(np.where(steps >= 0, steps + (strided != 0), steps), changes)
        return np.stack([routes, paths], axis=1)

    def _paths(self, codes: Integers, ways: Integers, pairs: Decoded) -> Integers:
        """(pairs,) the path of each, searched for where there is none yet."""
        distinct, places, where = np.unique(codes * _WAYS + ways, return_index=True, return_inverse=True)
        keys = distinct.tolist()
        new = np.array([key not in self._path_of for key in keys], np.bool_)
        if new.any():
            for key in distinct[new].tolist():
                self._path_of[key] = len(self._path_of)
            chosen = places[new]
            sources, targets = (list(map(tuple, ends[chosen].tolist())) for ends in (pairs.sources, pairs.targets))
            found = zip(map(Way, ways[chosen].tolist()), sources, targets, strict=True)
            self._add(sources, [moves_on(way, source, target, (), self._spare) for way, source, target in found])
        return np.array([self._path_of[key] for key in keys], np.int64)[where]

    def _add(self, sources: list[State], moves: list[tuple[Move, ...]]) -> None:
        """Enter paths: their steps, what these move, and the cuts."""
        paths = _Paths.of(sources, moves)
        before, after = paths.states[:, :-1], paths.states[:, 1:]
        axes = 1 << np.arange(self._axes)
        is_moving = before != after
        buffers = np.where(np.isin(paths.kinds, _BUFFER_BEHIND)[:, :, None], after, before)
        moving, cutting = ((chosen * axes).sum(axis=2) for chosen in (is_moving, buffers >= 0))
        factors = sum(np.where(is_moving & (state >= 0), 1 << np.maximum(state, 0), 0) for state in (before, after))
        steps = step_codes(paths.kinds, moving, cutting, self._axes)
        behind = ((0, 0), (0, MOST_STEPS * self._axes - steps.shape[1]))
        self._steps.append(np.pad(np.where(paths.kinds >= 0, steps, -1), behind, constant_values=-1))
        self._moved.append(np.pad(np.bitwise_or.reduce(factors, axis=2), behind))
        cuts = _cuts(paths, self._axes)
        self._alone.append(cuts.alone)
        self._together.append(cuts.together)
        self._across.append(cuts.across)


def _cuts(paths: _Paths, num_axes: int) -> Cuts:
    """The cuts of some paths. A spare dim has room for everything, so its cuts are left out."""
    count, num_states, _ = paths.states.shape
    labels = 2 * num_axes + 1
    sets = np.zeros((num_states, count, labels), np.int64)
    for label in range(2 * num_axes):
        sets[:, :, label] = ((paths.states == label) * (1 << np.arange(num_axes))).sum(axis=2).T
    bits = np.where(sets > 0, np.left_shift(1, sets), 0).astype(np.uint32)
    together = np.zeros((count, labels, labels), np.uint32)
    across = np.zeros_like(together)
    for state in range(num_states):
        together |= _beside(bits[state], sets[state])
    for step, kinds in enumerate(paths.kinds.T):
        swaps = kinds == ORDER.index("all_to_all")
        across[swaps] |= _beside(bits[step, swaps], sets[step + 1, swaps])
        across[swaps] |= _beside(bits[step + 1, swaps], sets[step, swaps])
    return Cuts(np.bitwise_or.reduce(bits, axis=0), together, across)


def _beside(bits: Bits, others: Integers) -> Bits:
    """(paths, labels, labels) the bits of the first label where the other one is cut."""
    return np.asarray(bits[:, :, None] * (others > 0)[:, None, :], np.uint32)


@cache
def general_routes(num_axes: int) -> GeneralRoutes:
    """The general routes over meshes of `num_axes`, shared by all of them in one process."""
    return GeneralRoutes(num_axes)
