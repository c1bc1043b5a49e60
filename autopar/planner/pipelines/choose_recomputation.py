"""Choose recomputation: of a cut, the fastest ways of recomputation with which every rank holds no more than its limit.

    8 chunks on a rank of 72 GiB    the stage search counts 9 GiB for each of them
                                    all of them together: two recompute, six do not

What a rank holds follows from the order of its passes. All chunks start at their fastest way; while the rank holds too
much, the change that takes away the most of that per second which it costs is made, and at last each that was not
needed is taken back. Ranks do not depend on each other in this.

Restricted: greedy within a rank; stages stand on one rank each. Where the order itself follows from seconds
(`TIMED_FAMILIES`), other ways of recomputation may make another order, whose peak the caller looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.schedule_player import pass_bytes
from autopar.cost_models.stage_costs import StageCosts
from autopar.planner.pipelines.block_table import BlockTable, Floats
from autopar.planner.pipelines.stage_search import StageChoice
from autopar.schedules.actions import Kind, PipeAction, Schedule

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")

Rows: TypeAlias = NDArray[np.int64]
"""The row of the way of every chunk."""
Change: TypeAlias = tuple[int, int]
"""A chunk, and the row of its new way."""


def fastest_recomputation(table: BlockTable, cut: Sequence[StageChoice], schedule: Schedule) -> list[int] | None:
    """The row of the way of recomputation of every stage; None where a rank holds more than `table.capacity_bytes` with
    all that was tried."""
    found = [0] * len(cut)
    for actions in schedule.ranks:
        stages = sorted({action.stage for action in actions})
        ways = [
            [table.stage(cut[stage].first, cut[stage].end, mode) for mode in range(len(table.modes))]
            for stage in stages
        ]
        chunks = _Chunks(
            held=np.stack([_held(own, stage, actions) for stage, own in zip(stages, ways, strict=True)]),
            seconds=np.array([[costs.compute_seconds for costs in own] for own in ways]),
            capacity_bytes=table.capacity_bytes,
        )
        modes = chunks.fastest()
        if modes is None:
            return None
        for stage, mode in zip(stages, modes.tolist(), strict=True):
            found[stage] = mode
    return found


def _held(ways: Sequence[StageCosts], stage: int, actions: Sequence[PipeAction]) -> Floats:
    """(R, 1 + 2 A) bytes of one chunk in each of R ways, before the first of its rank's A passes, in each of them and
    behind it."""
    own = np.array([action.stage == stage for action in actions])
    kinds = np.array([KINDS.index(action.kind) for action in actions])
    begun = sum(action.stage == stage and action.micro_batch < 0 for action in actions)
    rows = []
    for costs in ways:
        allocates, frees = np.array([pass_bytes(costs, kind) for kind in KINDS])[kinds].T * own
        start = costs.state_bytes + begun * costs.saved_bytes
        behind = start + np.cumsum(allocates - frees)
        rows.append(np.concatenate([[start], behind + frees, behind]))
    return np.stack(rows)


class _Chunks:
    """The chunks of one rank. held: (C, R, events) bytes of C chunks in R ways; seconds: (C, R) of a micro-batch."""

    def __init__(self, held: Floats, seconds: Floats, capacity_bytes: float) -> None:
        self._held, self._seconds, self._capacity = held, seconds, capacity_bytes
        self._chunks = np.arange(len(held))

    def fastest(self) -> Rows | None:
        """(C,) a way for each chunk, with which they fit."""
        rows = self._seconds.argmin(axis=1)
        while self._excess(rows) > 0.0:
            gains = {change: self._gain(rows, change) for change in self._slower(rows)}
            best = max(gains, key=gains.__getitem__, default=None)
            if best is None or gains[best] <= 0.0:
                return None
            rows = _with(rows, best)
        return self._taken_back(rows)

    def _taken_back(self, rows: Rows) -> Rows:
        """Chunks that cost the most first, each the fastest way with which all of them still fit."""
        lost = self._seconds[self._chunks, rows] - self._seconds.min(axis=1)
        for chunk in np.argsort(-lost, kind="stable").tolist():
            for mode in np.argsort(self._seconds[chunk], kind="stable").tolist():
                changed = _with(rows, (chunk, mode))
                if self._excess(changed) <= 0.0:
                    rows = changed
                    break
        return rows

    def _slower(self, rows: Rows) -> list[Change]:
        """Changes to slower ways."""
        slower = self._seconds > self._seconds[self._chunks, rows][:, None]
        return [(int(chunk), int(mode)) for chunk, mode in zip(*np.nonzero(slower), strict=True)]

    def _gain(self, rows: Rows, change: Change) -> float:
        """What a change takes away of what is too much, per second that it costs."""
        chunk, mode = change
        more = float(self._seconds[chunk, mode] - self._seconds[chunk, rows[chunk]])
        return (self._excess(rows) - self._excess(_with(rows, change))) / more

    def _excess(self, rows: Rows) -> float:
        """Bytes above the capacity, over all events."""
        return float(np.maximum(self._held[self._chunks, rows].sum(axis=0) - self._capacity, 0.0).sum())


def _with(rows: Rows, change: Change) -> Rows:
    changed = rows.copy()
    changed[change[0]] = change[1]
    return changed
