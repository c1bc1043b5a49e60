"""Route tables: sequences of steps that differ in what they cost, numbered once per number of mesh axes.

    (P, S(0)) -> (S(1), R)   gather over axis 1, reduce_scatter over axis 0 of strided blocks
                             [all_gather 0b10 of 0b00, reduce_scatter 0b01 of 0b00, transposing]   0b11 change

A step is written as (kind, axes, axes that cut its buffer, transposing), sets of axes as bits: enough to price it on
every mesh with so many axes, for every number of bytes. The million pairs of layouts of a Llama block on three
axes take 3,000 routes of 150 different steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autopar.layouts.moves import ORDER, StepKind
from autopar.layouts.placement import Shard
from autopar.layouts.redistribution import RedistributionStep
from autopar.planner.routes.growing import Growing

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

NOWHERE = 0
"""The route of pairs whose target cannot be reached."""

MOST_STEPS = 4
"""No route has more steps per axis."""


@dataclass(frozen=True, slots=True)
class PricedStep:
    """What the price of a step depends on, besides the sizes of the mesh and the bytes."""

    kind: StepKind
    axes: int
    """The axes that move, as bits."""
    cutting: int
    """The axes that cut its full buffer, as bits."""
    is_transposing: bool

    @classmethod
    def of(cls, step: RedistributionStep) -> PricedStep:
        """The step as numbers: which axes it uses, which cut its full buffer."""
        cutting = (axis for axis, placement in enumerate(step.buffer) if isinstance(placement, Shard))
        return cls(step.kind, _bits(step.axes), _bits(cutting), step.is_transposing)

    @classmethod
    def decode(cls, code: int, num_axes: int) -> PricedStep:
        """Inverse of `step_codes`, with the last bit for transposing."""
        code, is_transposing = divmod(code, 2)
        code, cutting = divmod(code, 1 << num_axes)
        kind, axes = divmod(code, 1 << num_axes)
        return cls(ORDER[kind], axes, cutting, bool(is_transposing))


def step_codes(kinds: Integers, axes: Integers, cutting: Integers, num_axes: int) -> Integers:
    """Codes of steps of such kinds (places in `ORDER`) that do not transpose; 1 more for those that do."""
    return ((kinds << num_axes | axes) << num_axes | cutting) << 1


def _bits(axes: Iterable[int]) -> int:
    return sum(1 << axis for axis in axes)


class RouteTable:
    """Routes by number, as rows of numbers of steps."""

    def __init__(self, num_axes: int) -> None:
        self.steps: list[PricedStep] = []
        self._axes = num_axes
        self._step_numbers: dict[PricedStep, int] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._rows: Growing[np.int64] = Growing((MOST_STEPS * num_axes,), np.int64)
        self._changes: Growing[np.int64] = Growing((), np.int64)
        self.number((), -1)

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, steps: Sequence[PricedStep], changes: int) -> int:
        """The route that takes these steps; changes: the axes whose placement differs between its ends, as bits."""
        row = [self._number_of_step(step) for step in steps]
        number = self._numbers.setdefault((changes, *row), len(self))
        if number == len(self):
            self._rows.append(np.array([row + [-1] * (MOST_STEPS * self._axes - len(row))], np.int64))
            self._changes.append(np.array([changes], np.int64))
        return number

    def steps_of(self, route: int) -> list[PricedStep]:
        """What a route takes, in order."""
        return [self.steps[number] for number in self._rows.rows[route].tolist() if number >= 0]

    def numbers(self, steps: Integers, changes: Integers) -> Integers:
        """(routes,) `number` of rows of codes of steps, -1 behind the last one."""
        keys, where = np.unique(np.column_stack([steps, changes]), axis=0, return_inverse=True)
        found = [
            self.number([PricedStep.decode(code, self._axes) for code in row if code >= 0], change)
            for *row, change in keys.tolist()
        ]
        return np.array(found, np.int64)[where.reshape(-1)]

    def seconds(self, first: int, step_seconds: Floats, change_seconds: Floats, unreachable: float) -> Floats:
        """(routes,) seconds of the routes from number `first` on: of their steps, by number, and `change_seconds` of
        every axis whose placement changes."""
        padded = np.append(step_seconds, 0.0)  # -1, behind the last step of a route, costs nothing
        total = padded[self._rows.rows[first:]].sum(axis=1)
        changed = self._changes.rows[first:, None] >> np.arange(self._axes) & 1
        total += changed @ change_seconds
        return np.asarray(np.where(np.arange(first, len(self)) == NOWHERE, unreachable, total))

    def _number_of_step(self, step: PricedStep) -> int:
        number = self._step_numbers.setdefault(step, len(self.steps))
        if number == len(self.steps):
            self.steps.append(step)
        return number


@cache
def route_table(num_axes: int) -> RouteTable:
    """The routes over meshes of `num_axes`, shared by all of them in one process."""
    return RouteTable(num_axes)
