"""Routes: the steps between two layouts, found once per class of pairs and priced by arrays.

    table of pairs -> codes of classes -> numbers of routes -> numbers of steps -> seconds at some number of bytes

`Routes` asks `redistribution_steps`, which the lowering emits, for one representative of every class of pairs on a mesh
shape (`pair_classes.py`) and numbers the steps that it meets: a few hundred differ in what they cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autopar.layout import Layout, Mesh
from autopar.passes.emit_redistribution import redistribution_steps
from autopar.planner.pair_classes import UNREACHABLE, Pair, PairClasses
from autopar.redistribute import Step

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_START = 256


class Routes:
    """The routes of one mesh shape. Route 0 leads nowhere: its target cannot be reached."""

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        self.steps: list[Step] = []
        """One of every kind of step that differs in its price."""
        self._mesh = Mesh(tuple(map(str, range(len(mesh_shape)))), mesh_shape)
        self._pairs = PairClasses(mesh_shape)
        self._numbers: dict[tuple[object, ...], int] = {}
        self._route_of: dict[int, int] = {UNREACHABLE: 0}
        self._steps_of = np.full((_START, 1), -1, np.int64)
        self._changes = np.zeros(_START, np.int64)
        self._count = 1

    def table(self, shape: Sequence[int], sources: Sequence[Layout], targets: Sequence[Layout]) -> Integers:
        """(sources, targets) numbers of routes."""
        codes = self._pairs.codes(shape, sources, targets)
        distinct, where = np.unique(codes, return_inverse=True)
        routes = np.empty(len(distinct), np.int64)
        for index, code in enumerate(distinct.tolist()):
            route = self._route_of.get(code)
            if route is None:
                route = self._route_of[code] = self._find(self._pairs.representative(code))
            routes[index] = route
        return routes[where.reshape(codes.shape)]

    def seconds(self, routes: Integers, step_seconds: Floats, change_seconds: float, unreachable: float) -> Floats:
        """Seconds of `routes`: of their steps, by number, and `change_seconds` per axis whose placement changes."""
        padded = np.append(step_seconds, 0.0)  # -1, behind the last step of a route, costs nothing
        total = padded[self._steps_of[: self._count]].sum(axis=1) + change_seconds * self._changes[: self._count]
        total[0] = unreachable
        return np.asarray(total[routes])

    def _find(self, pair: Pair) -> int:
        steps = redistribution_steps(pair.shape, pair.source, pair.target, self._mesh)
        numbers = [self._number(step) for step in steps]
        self._make_room(len(numbers))
        self._steps_of[self._count, : len(numbers)] = numbers
        self._changes[self._count] = sum(a != b for a, b in zip(pair.source, pair.target, strict=True))
        self._count += 1
        return self._count - 1

    def _make_room(self, num_steps: int) -> None:
        rows, columns = self._steps_of.shape
        if num_steps > columns:
            self._steps_of = np.pad(self._steps_of, ((0, 0), (0, num_steps - columns)), constant_values=-1)
        if self._count == rows:
            self._steps_of = np.pad(self._steps_of, ((0, rows), (0, 0)), constant_values=-1)
            self._changes = np.pad(self._changes, (0, rows))

    def _number(self, step: Step) -> int:
        key = (step.kind, step.axes, step.local_fraction, step.is_transposing)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.steps)
            self.steps.append(step)
        return number


@cache
def routes_of(mesh_shape: tuple[int, ...]) -> Routes:
    """The routes of a mesh shape, shared by all prices of one process."""
    return Routes(mesh_shape)
