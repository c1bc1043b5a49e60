"""Discrete-event simulation of one rank's straight-line program over several streams.

An action starts when its stream is free and all actions it depends on have ended; a stream runs its actions
in program order. Streams are "compute", one per set of mesh axes, and copies:

    simulate([Action("matmul", "compute", 2.0), Action("all_reduce", "tp", 3.0, (0,), communication=True),
              Action("matmul", "compute", 2.0)]).makespan_seconds        # 5.0: 1 s of the 3 s is exposed

With gloo a waited collective blocks the process: put all actions on the compute stream.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from autopar.files import write_atomically

COMPUTE_STREAM = "compute"

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Action:
    """One step of the program. `depends_on` holds indices of earlier actions."""

    name: str
    stream: str
    seconds: float
    depends_on: tuple[int, ...] = ()
    communication: bool = False
    """Counted as exposed while no computation runs beside it, whichever stream it is on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When each action ran; all times in seconds from the start of the program."""

    actions: tuple[Action, ...]
    start_seconds: tuple[float, ...]

    @property
    def intervals(self) -> list[Interval]:
        """(start, end) of each action."""
        return [(start, start + a.seconds) for a, start in zip(self.actions, self.start_seconds, strict=True)]

    @property
    def makespan_seconds(self) -> float:
        """When the last action ends."""
        return max((end for _, end in self.intervals), default=0.0)

    @property
    def busy_seconds(self) -> Mapping[str, float]:
        """Seconds of work on each stream."""
        busy: dict[str, float] = defaultdict(float)
        for action in self.actions:
            busy[action.stream] += action.seconds
        return dict(busy)

    @property
    def compute_seconds(self) -> float:
        """Seconds of work that is no communication, on all streams."""
        return sum(action.seconds for action in self.actions if not action.communication)

    @property
    def exposed_communication_seconds(self) -> float:
        """Time in which communication runs and no computation does."""
        timed = list(zip(self.actions, self.intervals, strict=True))
        computing = _union([interval for action, interval in timed if not action.communication])
        everything = _union([interval for _, interval in timed])
        return _length(everything) - _length(computing)

    def write_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline for chrome://tracing or Perfetto, atomically; one row per stream."""
        rows = {stream: row for row, stream in enumerate(dict.fromkeys(a.stream for a in self.actions))}
        names = [
            {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": stream}}
            for stream, row in rows.items()
        ]
        events = [
            {
                "ph": "X",
                "pid": 0,
                "tid": rows[a.stream],
                "name": a.name,
                "ts": start * 1e6,
                "dur": a.seconds * 1e6,
            }
            for a, start in zip(self.actions, self.start_seconds, strict=True)
        ]
        write_atomically(path, msgspec.json.encode({"traceEvents": names + events, "displayTimeUnit": "ms"}))


def simulate(actions: Sequence[Action]) -> Timeline:
    """Play the program. Raises ValueError where an action depends on itself or a later one."""
    starts: list[float] = []
    ends: list[float] = []
    stream_free: dict[str, float] = defaultdict(float)
    for index, action in enumerate(actions):
        if any(not 0 <= needed < index for needed in action.depends_on):
            raise ValueError(
                f"action {index} ({action.name}) depends on {action.depends_on}: only earlier ones can be"
            )
        start = max((ends[needed] for needed in action.depends_on), default=0.0)
        starts.append(max(start, stream_free[action.stream]))
        ends.append(starts[-1] + action.seconds)
        stream_free[action.stream] = ends[-1]
    return Timeline(actions=tuple(actions), start_seconds=tuple(starts))


def _union(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)
