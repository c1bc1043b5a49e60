"""Seconds of a call: by CUDA events on a GPU, by the clock on a CPU; warmed up, the median of many.

Between calls on a GPU a large buffer is filled, so that operands come from memory and not from the cache, and so that
the queue is never empty: what Python needs to launch a kernel is then not counted.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.storages import StorageTracker

WARM_UPS = 3
FLUSHED_BYTES = 2 * 2**30
"""Forty times the L2 of an H100, 0.7 ms: as long as Python may take to launch what an operator launches."""
BUSIEST = 40
"""Kernels of a step that are named."""


def median_seconds(call: Callable[[], object], device: torch.device, repeats: int = 20, *, flush: bool = True) -> float:
    """Of one call. flush: whether operands are to come from memory."""
    for _ in range(WARM_UPS):
        call()
    if device.type != "cuda":
        return statistics.median(_clock_seconds(call) for _ in range(repeats))
    buffer = torch.empty(FLUSHED_BYTES if flush else 0, dtype=torch.uint8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    for begin, end in events:
        buffer.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median([float(begin.elapsed_time(end)) * 1e-3 for begin, end in events])


def _clock_seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def copy_rate(device: torch.device, nbytes: int) -> float:
    """Bytes read and written per second by a copy of so many bytes."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / median_seconds(lambda: target.copy_(source), device)


def product_rate(device: torch.device, rows: int, inner: int, columns: int) -> float:
    """Operations per second of torch's product of (rows, inner) and (inner, columns) in bf16."""
    left, right = (torch.randn(size, inner, device=device).bfloat16() for size in (rows, columns))
    return 2 * rows * inner * columns / median_seconds(lambda: left @ right.t(), device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Training steps: the median of their seconds, and the most bytes that lived during one; reserved_bytes: what the
    caching allocator held for them, on a GPU."""

    seconds: float
    peak_bytes: int
    reserved_bytes: int | None = None


def measured_steps(step: Callable[[], object], device: torch.device, repeats: int, known: list[torch.Tensor]) -> Steps:
    """Of a step that has run before. known: what lives between steps, which on a CPU nobody else counts."""
    if device.type != "cuda":
        with StorageTracker(known) as tracker:
            step()
        return Steps(seconds=median_seconds(step, device, repeats), peak_bytes=tracker.peak_bytes)
    torch.cuda.reset_peak_memory_stats(device)
    seconds = median_seconds(step, device, repeats, flush=False)
    return Steps(
        seconds=seconds,
        peak_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
    )


def busiest_kernels(step: Callable[[], object], device: torch.device, repeats: int = 3) -> list[dict[str, Any]]:
    """Kernels of a step on a GPU: name, calls and seconds of a step, the busiest first; none on a CPU."""
    if device.type != "cuda":
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize(device)
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return [
        {
            "name": event.key[:100],
            "calls": round(event.count / repeats),
            "seconds": event.self_device_time_total * 1e-6 / repeats,
        }
        for event in events[:BUSIEST]
    ]


def free_memory(device: torch.device) -> None:
    """Give back what the last measurement held."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
