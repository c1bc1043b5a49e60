"""Memory as constraints: the moments at which a step can be fullest, as rows over the decisions.

    backward 3 (silu#2/bwd)     the sum of what lives (`live_bytes.py`) while this operator runs
    optimizer                   parameters, their state and all gradients

A step has as many moments as operators, and a few of them matter: in every segment (`time_segments.py`), of forward and
of backward, the one that is fullest under some plan that is known. Moments of forward are left out while backward is
fuller. After a solve all moments are looked at, and one that holds more than the limit becomes a row.

What is proven. The solver's bound holds for every plan whose sums of live bytes, plus the constants of the rows, stay
within the limit at the moments that are rows. Fewer moments make that a weaker claim, never a wrong one. The constants
are measured on lowered plans (`lowered_bytes.py`), and live bytes leave out buffers of collectives and count some
copies that another plan shares. So they are no lower bound of the memory of every program: under a limit that binds,
the bound is one of the problem with these rows, and a program that fits may lie outside of them. The bound without
rows, which every limit has too, speaks of all programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.layouts.placement import Mesh
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.live_bytes import find_live_bytes
from autopar.planner.problem.build import Built
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.planner.problem.prices import Floats
from autopar.planner.solver import MemoryRow

Labels = NDArray[np.int64]
FORWARD_SHARE = 0.97
"""A moment of forward becomes a row where it holds this part of the fullest moment of all."""


class MemoryModel:
    """What a step holds at every position, for the labels of one problem."""

    def __init__(self, built: Built, mesh: Mesh, state_bytes: Mapping[str, StateBytes], lifetimes: Lifetimes) -> None:
        self.lifetimes = lifetimes
        self._live_bytes = find_live_bytes(built, mesh, state_bytes, lifetimes)
        self._first = np.array([live.first for live in self._live_bytes], dtype=np.int64)
        self._last = np.array([live.last for live in self._live_bytes], dtype=np.int64)
        self._is_none = {id(live.bytes): not live.bytes.any() for live in self._live_bytes}
        self._sums: dict[tuple[int, ...], Floats] = {}

    def over_time(self, labels: Labels) -> Floats:
        """(positions,) bytes under an assignment: one per operator, and the optimizer's."""
        chosen = labels.tolist()
        held = np.array([live.bytes[chosen[live.variable]] for live in self._live_bytes])
        change = np.zeros(self.lifetimes.end + 2)
        np.add.at(change, self._first, held)
        np.add.at(change, self._last + 1, -held)
        return np.asarray(np.cumsum(change)[:-1])

    def at(self, position: int) -> dict[int, Floats]:
        """Variable -> bytes per label at a position; zeros are left out, equal sums are one array."""
        parts: dict[int, list[Floats]] = {}
        for number in np.flatnonzero((self._first <= position) & (position <= self._last)).tolist():
            live = self._live_bytes[number]
            if not self._is_none[id(live.bytes)]:
                parts.setdefault(live.variable, []).append(live.bytes)
        return {variable: self._sum(arrays) for variable, arrays in sorted(parts.items())}

    def _sum(self, arrays: Sequence[Floats]) -> Floats:
        if len(arrays) == 1:
            return arrays[0]
        key = tuple(sorted(map(id, arrays)))  # the live bytes keep them alive
        if key not in self._sums:
            self._sums[key] = np.sum(arrays, axis=0)
        return self._sums[key]

    def name(self, position: int) -> str:
        """How a position is called in messages."""
        if position == self.lifetimes.end:
            return "optimizer"
        node = self.lifetimes.in_order[position]
        return f"{node.meta['phase']} {self.lifetimes.segment[node]} ({node.meta['operator']})"

    def fullest_positions(self, over_time: Iterable[Floats]) -> list[int]:
        """The fullest position of every segment and phase, under each of some plans; and the optimizer's."""
        found = {self.lifetimes.end}
        for held in over_time:
            best: dict[tuple[str, int], int] = {}
            for position, node in enumerate(self.lifetimes.in_order):
                key = str(node.meta["phase"]), self.lifetimes.segment[node]
                if key not in best or held[position] > held[best[key]]:
                    best[key] = position
            least = FORWARD_SHARE * float(held.max())
            found |= {p for (phase, _), p in best.items() if phase == "backward" or held[p] >= least}
        return sorted(found)

    def rows(self, positions: Sequence[int], budget_bytes: float, beyond: Floats) -> tuple[MemoryRow, ...]:
        """One row per position. beyond: (positions of the step,) bytes that a moment holds beside its live bytes."""
        return tuple(
            MemoryRow(
                name=self.name(position),
                bytes=self.at(position),
                budget_bytes=budget_bytes,
                constant_bytes=float(beyond[position]),
            )
            for position in positions
        )
