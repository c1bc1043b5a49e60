"""Route tables: sequences of steps that differ in what they cost, numbered once per number of mesh axes.

    (P, S(0)) -> (S(1), R)   gather over axis 1, reduce_scatter over axis 0 of strided blocks
                             [all_gather 0b10 of 0b10, reduce_scatter 0b01 of 0b00, transposing]   2 axes change

A step is written as (kind, axes, axes that hold blocks before it, transposing), sets of axes as bits: enough to price
it on every mesh with so many axes, for every number of bytes. The million pairs of layouts of a Llama block on three
axes take 3,000 routes of 150 different steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autopar.layout import Shard
from autopar.redistribute import Step, StepKind

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

NOWHERE = 0
"""The route of pairs whose target cannot be reached."""

_START = 256


@dataclass(frozen=True, slots=True)
class PlainStep:
    """What the price of a step depends on, besides the sizes of the mesh and the bytes."""

    kind: StepKind
    axes: int
    """The axes that move, as bits."""
    sharded: int
    """The axes that hold blocks before the step, as bits."""
    is_transposing: bool

    @classmethod
    def of(cls, step: Step, is_transposing: bool) -> PlainStep:
        sharded = (axis for axis, placement in enumerate(step.before) if isinstance(placement, Shard))
        return cls(step.kind, _bits(step.axes), _bits(sharded), is_transposing)


def _bits(axes: Iterable[int]) -> int:
    return sum(1 << axis for axis in axes)


class RouteTable:
    """Routes by number, as rows of numbers of steps."""

    def __init__(self) -> None:
        self.steps: list[PlainStep] = []
        self._step_numbers: dict[PlainStep, int] = {}
        self._numbers: dict[tuple[tuple[int, ...], int], int] = {}
        self._rows = np.full((_START, 1), -1, np.int64)
        self._changes = np.zeros(_START, np.int64)
        self._count = NOWHERE + 1

    def __len__(self) -> int:
        return self._count

    def number(self, steps: Sequence[PlainStep], changes: int) -> int:
        """The route that takes these steps; changes: axes whose placement differs between its ends."""
        row = tuple([self._number_of_step(step) for step in steps])
        number = self._numbers.get((row, changes))
        if number is None:
            number = self._numbers[row, changes] = self._count
            self._make_room(len(row))
            self._rows[number, : len(row)] = row
            self._changes[number] = changes
            self._count += 1
        return number

    def seconds(self, step_seconds: Floats, change_seconds: float, unreachable: float) -> Floats:
        """(routes,) seconds of their steps, by number, and `change_seconds` per axis whose placement changes."""
        padded = np.append(step_seconds, 0.0)  # -1, behind the last step of a route, costs nothing
        total = padded[self._rows[: self._count]].sum(axis=1) + change_seconds * self._changes[: self._count]
        total[NOWHERE] = unreachable
        return np.asarray(total)

    def _make_room(self, num_steps: int) -> None:
        rows, columns = self._rows.shape
        if num_steps > columns:
            self._rows = np.pad(self._rows, ((0, 0), (0, num_steps - columns)), constant_values=-1)
        if self._count == rows:
            self._rows = np.pad(self._rows, ((0, rows), (0, 0)), constant_values=-1)
            self._changes = np.pad(self._changes, (0, rows))

    def _number_of_step(self, step: PlainStep) -> int:
        number = self._step_numbers.get(step)
        if number is None:
            number = self._step_numbers[step] = len(self.steps)
            self.steps.append(step)
        return number


@cache
def route_table(num_axes: int) -> RouteTable:
    """The routes over meshes of `num_axes`, shared by all of them in one process."""
    return RouteTable()
