"""Measure the host: copies between a device and it, its memory, and its files.

    measure_host(memcpy_seconds, "memcpy", is_device_memory=True)       # CPU processes, whose memory is the host's
    measure_host(cuda_seconds, "pinned copies")                         # a GPU, in each direction and in both at once

Copies are timed at two sizes, between which lies the rate; the small one is the latency. A file is written to the disk
and read back from it (not from the page cache, where the system lets us drop it). How many devices share a link no
single process sees: that is the preset's, or the user's.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from autopar.files import cache_directory
from autopar.hardware.cluster import machine_name, process_memory_bytes
from autopar.hardware.hosts import Host, HostLink, Storage

Way: TypeAlias = Literal["to_host", "from_host", "both"]
CopySeconds: TypeAlias = Callable[[Way, int], float]
"""Seconds of a copy of so many bytes one way, or of one in each direction at once."""

SMALL_BYTES, LARGE_BYTES = 1 << 12, 1 << 25
FILE_BYTES = 1 << 25
REPEATS = 3


def measure_host(
    seconds: CopySeconds, name: str, *, is_device_memory: bool = False, folder: Path | None = None
) -> Host:
    """This machine's host as one process sees it. folder: of the disk that is measured; None: the cache directory's."""
    source = f"autopar.runtime.calibration.measure_host, {machine_name()}, {_now()}"
    return Host(
        memory_bytes=process_memory_bytes(1),
        memory_bytes_per_second=memory_rate(),
        link=measured_link(seconds, name, source),
        storage=measured_storage(folder or cache_directory(), source),
        is_device_memory=is_device_memory,
        sources={"memory_bytes": "of the system", "memory_bytes_per_second": source},
    )


def measured_link(seconds: CopySeconds, name: str, source: str) -> HostLink:
    """The line through copies of two sizes, each the fastest of several."""
    ways: tuple[Way, ...] = ("to_host", "from_host", "both")
    latency = max(min(seconds(way, SMALL_BYTES) for _ in range(REPEATS)) for way in ways[:2])
    large = {way: min(seconds(way, LARGE_BYTES) for _ in range(REPEATS)) for way in ways}

    def rate(way: Way, nbytes: int) -> float:
        return nbytes / max(large[way] - latency, 1e-9)

    to_host, from_host = rate("to_host", LARGE_BYTES), rate("from_host", LARGE_BYTES)
    return HostLink(
        name=name,
        latency_seconds=latency,
        to_host_bytes_per_second=to_host,
        from_host_bytes_per_second=from_host,
        both_bytes_per_second=min(rate("both", 2 * LARGE_BYTES), to_host + from_host),
        source=source,
    )


def memory_rate(nbytes: int = LARGE_BYTES) -> float:
    """Bytes per second that a copy of one process reads and writes."""
    return 2.0 * nbytes / min(memcpy_seconds("to_host", nbytes) for _ in range(REPEATS))


def memcpy_seconds(way: Way, nbytes: int) -> float:
    """Of a copy inside the memory of the host; both: of two copies, one after the other."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    begin = time.perf_counter()
    for _ in range(2 if way == "both" else 1):
        target.copy_(source)
    return time.perf_counter() - begin


def cuda_seconds(way: Way, nbytes: int) -> float:
    """Of copies between pinned memory and the current CUDA device, each direction on a stream of its own."""
    pairs: list[tuple[Any, Any]] = []
    for direction in ("to_host", "from_host"):
        if way in (direction, "both"):
            there = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
            here = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
            pairs.append((here, there) if direction == "to_host" else (there, here))
    streams = [torch.cuda.Stream() for _ in pairs]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for stream, (target, source) in zip(streams, pairs, strict=True):
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def measured_storage(folder: Path, source: str, nbytes: int = FILE_BYTES) -> Storage:
    """Seconds of a file of so many bytes, of which nothing stays in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    content = os.urandom(1 << 20) * (nbytes >> 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        begin = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - begin
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin = time.perf_counter()
        file.read()
        read = time.perf_counter() - begin
    return Storage(
        name="disk", read_bytes_per_second=nbytes / read, write_bytes_per_second=nbytes / written, source=source
    )


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
