"""The timeline of a report: a step read from a Chrome trace, thinned to what a screen can show.

    step = read_timeline("step.json")       # written by `autopar simulate --trace`, or by a profiler of a run
    drawn_tracks(step)                      # tracks of spans, neighbours too short to be seen drawn as one

Predicted and measured steps have the same form, so one page may show either.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, TypeAlias

from autopar.cost_models.chrome_trace import MemoryEvent, Span
from autopar.cost_models.simulator import COMPUTE_STREAM, Timeline
from autopar.errors import ConfigurationError
from autopar.files import decoded_json, file_content

MOST_SPANS = 12_000
"""Spans that a page draws; more make it slow to open."""
FINEST = 40_000
"""Parts of the step: what lies closer together than one of them is drawn as one span; fewer where too many are left."""
CURVE_WIDTH, CURVE_HEIGHT, CURVE_POINTS = 1000, 120, 2_000

MESSAGE = " -> "
"""In the name of a span between two stages: "0F0 -> 1"."""

DrawnSpan: TypeAlias = tuple[str, float, float]
"""Name, start and length in microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step: what every stream of every rank did, and the live bytes of every rank over time."""

    spans: tuple[Span, ...]
    memory: dict[int, list[MemoryEvent]]

    @classmethod
    def of(cls, timeline: Timeline) -> RecordedStep:
        """A simulated step."""
        return cls(
            spans=tuple(timeline.spans), memory={rank: timeline.memory_over_time(rank) for rank in timeline.ranks}
        )

    @property
    def seconds(self) -> float:
        """From 0 to the end of the last span."""
        return max((span.end_seconds for span in self.spans), default=0.0)


@dataclass(frozen=True, slots=True)
class Curve:
    """Live bytes of a rank as an SVG path in a box of CURVE_WIDTH x CURVE_HEIGHT."""

    rank: int
    peak_bytes: float
    path: str


@dataclass(frozen=True, slots=True)
class StreamTraffic:
    """Collectives of one kind on one stream of one rank."""

    rank: int
    stream: str
    kind: str
    count: int
    seconds: float


def read_timeline(path: str | os.PathLike[str]) -> RecordedStep:
    """Read a Chrome trace. Raises ConfigurationError where the file is missing or is none."""
    content = file_content(path, f"the trace {os.fspath(path)}")
    try:
        document = decoded_json(content, "the file")
        events: list[dict[str, Any]] = document["traceEvents"] if isinstance(document, dict) else document
        streams = {(e["pid"], e["tid"]): str(e["args"]["name"]) for e in events if e.get("name") == "thread_name"}
        spans = [_span(event, streams) for event in events if event["ph"] == "X"]
        memory: dict[int, list[MemoryEvent]] = defaultdict(list)
        for event in events:
            if event["ph"] == "C" and event.get("name") == "memory":
                memory[event["pid"]].append((event["ts"] * 1e-6, float(event["args"]["bytes"])))
    except (ConfigurationError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{os.fspath(path)} is no Chrome trace ({error}); `autopar simulate PLAN --trace FILE` writes one"
        ) from error
    if not spans:
        raise ConfigurationError(f"the trace {os.fspath(path)} holds no span: there is no step to draw")
    return RecordedStep(spans=tuple(spans), memory=dict(memory))


def _span(event: dict[str, Any], streams: dict[tuple[int, int], str]) -> Span:
    start = event["ts"] * 1e-6
    return Span(
        rank=event["pid"],
        stream=streams.get((event["pid"], event["tid"]), str(event["tid"])),
        name=str(event["name"]),
        start_seconds=start,
        end_seconds=start + event["dur"] * 1e-6,
    )


def drawn_tracks(step: RecordedStep) -> dict[str, Any]:
    """{"seconds", "tracks": [{"rank", "stream", "busy" (share of the step), "spans": [DrawnSpan]}]}."""
    tracks: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in step.spans:
        if span.end_seconds > span.start_seconds:
            tracks[span.rank, span.stream].append(span)
    parts = FINEST
    while True:
        drawn = {track: _thinned(spans, step.seconds / parts) for track, spans in tracks.items()}
        if sum(map(len, drawn.values())) <= MOST_SPANS or parts < 2 * len(tracks):
            break
        parts //= 2
    return {
        "seconds": step.seconds,
        "tracks": [
            {"rank": rank, "stream": stream, "busy": _busy(tracks[rank, stream]) / step.seconds, "spans": spans}
            for (rank, stream), spans in sorted(drawn.items(), key=lambda item: _order(*item[0]))
        ],
    }


def covered_seconds(spans: list[tuple[float, float]]) -> float:
    """Seconds in which at least one span runs."""
    covered, until = 0.0, 0.0
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _order(rank: int, stream: str) -> tuple[int, bool, str]:
    return (rank, stream != COMPUTE_STREAM, stream)


def _busy(spans: list[Span]) -> float:
    return sum(span.end_seconds - span.start_seconds for span in spans)


def _thinned(spans: list[Span], shortest: float) -> list[DrawnSpan]:
    """Neighbours that are shorter than `shortest` and no further apart, as one span."""
    found: list[DrawnSpan] = []
    for span in sorted(spans, key=lambda span: span.start_seconds):
        start, length = span.start_seconds * 1e6, (span.end_seconds - span.start_seconds) * 1e6
        if found:
            name, before, long = found[-1]
            short = shortest * 1e6
            if start - before - long < short and min(long, length) < short:
                found[-1] = (name if name.endswith(" ...") else f"{name} ...", before, start + length - before)
                continue
        found.append((span.name, start, length))
    return [(name, round(start, 2), round(length, 2)) for name, start, length in found]


def drawn_memory(step: RecordedStep) -> list[Curve]:
    """A curve per rank that says its memory; the height of all is that of the largest peak."""
    peak = max((live for events in step.memory.values() for _, live in events), default=0.0)
    return [_curve(rank, events, step.seconds, peak) for rank, events in sorted(step.memory.items()) if events and peak]


def _curve(rank: int, events: list[MemoryEvent], seconds: float, peak: float) -> Curve:
    per_point: dict[int, float] = {}
    for at, live in events:
        point = int(at / seconds * CURVE_POINTS) if seconds else 0
        per_point[point] = max(per_point.get(point, 0.0), live)
    steps = [f"M0,{CURVE_HEIGHT}"]
    for point, live in sorted(per_point.items()):
        steps.append(f"H{point * CURVE_WIDTH / CURVE_POINTS:g}V{CURVE_HEIGHT * (1.0 - live / peak):.1f}")
    own = max(live for _, live in events)
    return Curve(rank, own, "".join([*steps, f"H{CURVE_WIDTH}V{CURVE_HEIGHT}Z"]))


def communication(step: RecordedStep) -> list[StreamTraffic]:
    """Collectives and messages by rank, stream and kind (the text behind the colon of a span's name)."""
    found: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for span in step.spans:
        if span.stream != COMPUTE_STREAM:
            kind = "message" if MESSAGE in span.name else span.name.rpartition(": ")[2]
            found[span.rank, span.stream, kind].append(span.end_seconds - span.start_seconds)
    rows = [StreamTraffic(*key, len(lengths), sum(lengths)) for key, lengths in found.items()]
    return sorted(rows, key=lambda row: (row.rank, -row.seconds))
