"""Discrete-event simulation of programs on ranks and streams.

An action starts when its stream is free and all actions it depends on have ended; a stream of a rank runs its actions
in program order. Streams are "compute", one per set of mesh axes, copy engines, and "p2p":

    simulate([Action("matmul", "compute", 2.0), Action("all_reduce", "tp", 3.0, (0,), communication=True),
              Action("matmul", "compute", 2.0)]).makespan_seconds        # 5.0: 1 s of the 3 s is exposed

Copies to and from the host take no multiprocessors, but devices behind one port of the host share it: actions that name
one `link` divide it among those that run at a time.

Kernels of communication take multiprocessors and bandwidth from computation beside them: `Interference` slows both
while they run together, t = max(compute', communication'). With gloo a waited collective blocks the process: put all
actions on the compute stream.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models.chrome_trace import MemoryEvent, Span, write_trace
from autopar.errors import ConfigurationError

COMPUTE_STREAM = "compute"
TO_HOST_STREAM, FROM_HOST_STREAM = "to host", "from host"
COPY_STREAMS = (TO_HOST_STREAM, FROM_HOST_STREAM)
"""A device's two copy engines."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Action:
    """One step of the program. `depends_on` holds indices of earlier actions, of any rank."""

    name: str
    stream: str
    seconds: float
    depends_on: tuple[int, ...] = ()
    communication: bool = False
    """Counted as exposed while no computation runs beside it, whichever stream it is on."""
    rank: int = 0
    allocates: float = 0.0
    """Bytes that live from the action's start on."""
    frees: float = 0.0
    """Bytes that are gone at the action's end."""
    link: str = ""
    """What it shares with the actions of all ranks that name it, too: of k that run at once, each takes k times as
    long. Empty: nothing is shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """How many times longer work takes while the other kind runs on the same rank."""

    compute: float = 1.0
    communication: float = 1.0
    both_ways: float = 1.0
    """Copies to and from the host of one rank, beside each other."""

    def __post_init__(self) -> None:
        if min(self.compute, self.communication, self.both_ways) < 1.0:
            raise ConfigurationError(
                f"interference {self.compute}, {self.communication}, {self.both_ways}: nothing runs faster beside"
            )


ALONE = Interference()
GALVATRON_OVERLAP = Interference(compute=1.125552573612729)
"""Matrix products beside an all-reduce on A100 with NVLink: Hetu-Galvatron galvatron/profile_hardware/
hardware_configs/overlap_coefficient.json @cea12ff."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When each action ran; all times in seconds from the start of the program."""

    actions: tuple[Action, ...]
    start_seconds: tuple[float, ...]
    end_seconds: tuple[float, ...]

    @property
    def intervals(self) -> list[Interval]:
        """(start, end) of each action."""
        return list(zip(self.start_seconds, self.end_seconds, strict=True))

    @property
    def spans(self) -> list[Span]:
        """The actions with their times."""
        return [
            Span(rank=action.rank, stream=action.stream, name=action.name, start_seconds=start, end_seconds=end)
            for action, (start, end) in zip(self.actions, self.intervals, strict=True)
        ]

    @property
    def makespan_seconds(self) -> float:
        """When the last action ends."""
        return max(self.end_seconds, default=0.0)

    @property
    def ranks(self) -> list[int]:
        """All ranks that act."""
        return sorted({action.rank for action in self.actions})

    @property
    def busy_seconds(self) -> Mapping[str, float]:
        """Seconds of work on each stream, all ranks together."""
        busy: dict[str, float] = defaultdict(float)
        for action, (start, end) in zip(self.actions, self.intervals, strict=True):
            busy[action.stream] += end - start
        return dict(busy)

    @property
    def compute_seconds(self) -> float:
        """Seconds of work that is no communication, on all streams and ranks, as if it ran alone."""
        return sum(action.seconds for action in self.actions if not action.communication)

    @property
    def exposed_communication_seconds(self) -> float:
        """Time in which communication runs and no computation does, on the rank that has most of it."""
        return max((self._exposed(rank) for rank in self.ranks), default=0.0)

    @property
    def bubble_rate(self) -> float:
        """Part of all ranks' time, from start to makespan, in which they do not compute."""
        total = self.makespan_seconds * len(self.ranks)
        computing = sum(_length(_union(self._intervals(rank, False))) for rank in self.ranks)
        return 1.0 - computing / total if total else 0.0

    def occupied_seconds(self, rank: int) -> float:
        """Time in which a rank computes or communicates."""
        return _length(_union(self._intervals(rank, None)))

    def memory_over_time(self, rank: int = 0) -> list[MemoryEvent]:
        """(seconds, bytes from then on) whenever a rank's live bytes change; frees come before allocations."""
        deltas: list[tuple[float, float]] = []
        for action, (start, end) in zip(self.actions, self.intervals, strict=True):
            if action.rank == rank:
                deltas += [(start, action.allocates)] * (action.allocates != 0.0)
                deltas += [(end, -action.frees)] * (action.frees != 0.0)
        events: list[MemoryEvent] = []
        live = 0.0
        for seconds, delta in sorted(deltas):
            live += delta
            events.append((seconds, live))
        return events

    def peak_bytes(self, rank: int = 0) -> float:
        """The most bytes that a rank's actions hold at once."""
        return max((live for _, live in self.memory_over_time(rank)), default=0.0)

    def write_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write for chrome://tracing or Perfetto: a process per rank, a track per stream, live bytes as a counter."""
        write_trace(path, self.spans, {rank: self.memory_over_time(rank) for rank in self.ranks})

    def _intervals(self, rank: int, communication: bool | None) -> list[Interval]:
        return [
            interval
            for action, interval in zip(self.actions, self.intervals, strict=True)
            if action.rank == rank and communication in (None, action.communication)
        ]

    def _exposed(self, rank: int) -> float:
        return self.occupied_seconds(rank) - _length(_union(self._intervals(rank, False)))


def simulate(actions: Sequence[Action], interference: Interference = ALONE) -> Timeline:
    """Play the program. Raises ValueError where an action depends on itself or a later one."""
    for index, action in enumerate(actions):
        if any(not 0 <= needed < index for needed in action.depends_on):
            raise ValueError(f"action {index} ({action.name}) depends on {action.depends_on}: only earlier ones can be")
    alone = interference == ALONE and not any(action.link for action in actions)
    starts, ends = _play(actions) if alone else _Interfered(actions, interference).play()
    return Timeline(actions=tuple(actions), start_seconds=tuple(starts), end_seconds=tuple(ends))


def _play(actions: Sequence[Action]) -> tuple[list[float], list[float]]:
    """Without interference an action's times follow from those of earlier actions: one pass."""
    starts: list[float] = []
    ends: list[float] = []
    stream_free: dict[tuple[int, str], float] = defaultdict(float)
    for action in actions:
        stream = (action.rank, action.stream)
        start = max((ends[needed] for needed in action.depends_on), default=0.0)
        starts.append(max(start, stream_free[stream]))
        ends.append(starts[-1] + action.seconds)
        stream_free[stream] = ends[-1]
    return starts, ends


class _Interfered:
    """Work progresses at a rate that changes whenever an action of its rank begins or ends."""

    def __init__(self, actions: Sequence[Action], interference: Interference) -> None:
        self.actions = actions
        self.interference = interference
        self.queues: dict[tuple[int, str], list[int]] = defaultdict(list)
        for index in reversed(range(len(actions))):
            self.queues[actions[index].rank, actions[index].stream].append(index)
        self.running: dict[tuple[int, str], int] = {}
        self.left = [action.seconds for action in actions]
        self.starts = [0.0] * len(actions)
        self.ends: list[float | None] = [None] * len(actions)
        self.now = 0.0

    def play(self) -> tuple[list[float], list[float]]:
        self._begin()
        while self.running:
            rates = self._rates()
            elapsed = min(self.left[index] / rates[index] for index in self.running.values())
            self.now += elapsed
            for stream, index in list(self.running.items()):
                self.left[index] -= elapsed * rates[index]
                if self.left[index] <= 1e-12 * self.actions[index].seconds:
                    self.ends[index] = self.now
                    del self.running[stream]
            self._begin()
        return self.starts, [end for end in self.ends if end is not None]

    def _begin(self) -> None:
        """Start the head of every free stream whose inputs have come; one without length ends at once."""
        begun = True
        while begun:
            begun = False
            for stream, queue in self.queues.items():
                if stream in self.running or not queue:
                    continue
                index = queue[-1]
                if any(self.ends[needed] is None for needed in self.actions[index].depends_on):
                    continue
                queue.pop()
                self.starts[index] = self.now
                if self.left[index] > 0.0:
                    self.running[stream] = index
                else:
                    self.ends[index] = self.now
                begun = True

    def _rates(self) -> dict[int, float]:
        kinds = defaultdict(set)
        sharing: dict[str, int] = defaultdict(int)
        for (rank, stream), index in self.running.items():
            action = self.actions[index]
            sharing[action.link] += 1
            if stream not in COPY_STREAMS:
                kinds[rank].add(action.communication)
        slow = {True: 1.0 / self.interference.communication, False: 1.0 / self.interference.compute}
        found = {}
        for (rank, stream), index in self.running.items():
            action = self.actions[index]
            if stream in COPY_STREAMS:
                both = all((rank, way) in self.running for way in COPY_STREAMS)
                found[index] = 1.0 / self.interference.both_ways if both else 1.0
            else:
                found[index] = slow[action.communication] if len(kinds[rank]) == 2 else 1.0
            if action.link:
                found[index] /= sharing[action.link]
        return found


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
