"""The Chrome trace format, which chrome://tracing and Perfetto show: spans on tracks, and counters.

A process per rank, a thread per stream, and the counter "memory" with the rank's live bytes; times in microseconds:

    write_trace("step.json", [Span(rank=0, stream="compute", name="0F0", start_seconds=0, end_seconds=2e-3)],
                {0: [(0.0, 1 << 20), (2e-3, 0.0)]})
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from autopar.files import write_atomically

MemoryEvent: TypeAlias = tuple[float, float]
"""(seconds, bytes that live from then on)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a stream of a rank did from when to when."""

    rank: int
    stream: str
    name: str
    start_seconds: float
    end_seconds: float


def write_trace(
    path: str | os.PathLike[str], spans: Sequence[Span], memory: Mapping[int, Sequence[MemoryEvent]]
) -> None:
    """Write spans and counters as one JSON file, atomically; streams stand in the order in which they appear."""
    tracks = {track: row for row, track in enumerate(dict.fromkeys((span.rank, span.stream) for span in spans))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        for rank in sorted({span.rank for span in spans})
    ]
    events += [
        {"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": stream}}
        for (rank, stream), row in tracks.items()
    ]
    events += [
        {
            "ph": "X",
            "pid": span.rank,
            "tid": tracks[span.rank, span.stream],
            "name": span.name,
            "ts": span.start_seconds * 1e6,
            "dur": (span.end_seconds - span.start_seconds) * 1e6,
        }
        for span in spans
    ]
    events += [
        {"ph": "C", "pid": rank, "name": "memory", "ts": seconds * 1e6, "args": {"bytes": live}}
        for rank, changes in memory.items()
        for seconds, live in changes
    ]
    write_atomically(path, msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))
