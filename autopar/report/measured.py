"""A predicted and a measured step in one trace, for Perfetto and chrome://tracing.

    write_side_by_side("both.json", simulation.timeline, ["rank0.json", "rank1.json"])

The measured files are what `torch.profiler` exports, one per rank. Each simulated and each measured rank is a process,
each stream or thread a track; both steps begin at 0, and measured ranks keep their distances from each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from autopar.cost_models.simulator import Timeline
from autopar.errors import ConfigurationError
from autopar.files import decoded_json, file_content, write_atomically

Event = dict[str, Any]

MEASURED_PIDS = 1_000_000
"""Added to the number of a measured rank: processes of a trace have numbers of their own."""
WORK = ("cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_runtime")
"""Categories of Kineto that are shown; Python frames and the profiler's own marks are not."""
STEP = "ProfilerStep#"
CUDA = 1
"""Kineto's number of the device type in events of memory; CPUs are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRank:
    """What one rank's profiler wrote, cut to one step; begin and all times in microseconds of one clock."""

    rank: int
    begin: float
    events: tuple[Event, ...]


def write_side_by_side(path: str | os.PathLike[str], timeline: Timeline, measured: Sequence[str | Path]) -> None:
    """Write both steps, atomically. Raises ConfigurationError for a file that is no trace of torch.profiler."""
    timeline.write_chrome_trace(path)
    predicted: list[Event] = decoded_json(file_content(path, "the step"), "the step")["traceEvents"]
    for event in predicted:
        if event["name"] == "process_name":
            event["args"]["name"] = f"predicted rank {event['pid']}"
    ranks = [read_measured(file, place) for place, file in enumerate(measured)]
    begin = min((rank.begin for rank in ranks), default=0.0)
    events = predicted + [event for rank in ranks for event in _placed(rank, begin)]
    write_atomically(path, msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))


def read_measured(path: str | Path, place: int) -> MeasuredRank:
    """The last step that the profiler's schedule marked, or everything. place: the rank where the file says none."""
    content = file_content(path, f"the trace {path}")
    try:
        document = decoded_json(content, "the file")
        clock = float(document.get("baseTimeNanoseconds", 0)) * 1e-3
        events: list[Event] = [event for event in document["traceEvents"] if _counts(event)]
        rank = int((document.get("distributedInfo") or {}).get("rank", place))
        steps = [event for event in events if str(event["name"]).startswith(STEP) and event.get("dur")]
        if not events:
            raise ValueError("it holds no operator, kernel or memory event")
        first = min(float(event["ts"]) for event in events)
        last = max(float(event["ts"]) + float(event.get("dur", 0.0)) for event in events)
        if steps:
            step = max(steps, key=lambda event: float(event["ts"]))
            first, last = float(step["ts"]), float(step["ts"]) + float(step["dur"])
        inside = tuple(event for event in events if first <= float(event["ts"]) <= last)
    except (ConfigurationError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is no trace of torch.profiler ({error}): write one per rank with profile.export_chrome_trace"
        ) from error
    shifted = tuple({**event, "ts": float(event["ts"]) + clock} for event in inside)
    return MeasuredRank(rank=rank, begin=first + clock, events=shifted)


def _counts(event: Event) -> bool:
    return (event["ph"] == "X" and event.get("cat") in WORK) or event.get("name") == "[memory]"


def _placed(measured: MeasuredRank, begin: float) -> Iterator[Event]:
    """The events of a rank as a process of the common trace, whose time 0 is `begin`."""
    pid = MEASURED_PIDS + measured.rank
    tracks: dict[Any, int] = {}
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"measured rank {measured.rank}"}}
    kinds = {event["args"].get("Device Type") for event in measured.events if event["ph"] != "X"}
    shown = CUDA if CUDA in kinds else 0
    for event in measured.events:
        at = event["ts"] - begin
        if event["ph"] == "X":
            where = event["tid"]
            if where not in tracks:
                tracks[where] = len(tracks)
                device = event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
                name = f"{'stream' if device else 'thread'} {tracks[where]}"
                yield {"ph": "M", "pid": pid, "tid": tracks[where], "name": "thread_name", "args": {"name": name}}
            yield {"ph": "X", "pid": pid, "tid": tracks[where], "name": event["name"], "ts": at, "dur": event["dur"]}
        elif event["args"].get("Device Type") == shown:
            live = float(event["args"]["Total Allocated"])
            yield {"ph": "C", "pid": pid, "name": "memory", "ts": at, "args": {"bytes": live}}
