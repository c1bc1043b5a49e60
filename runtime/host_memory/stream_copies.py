"""Copies of a GPU on two streams, one per direction, beside the stream that computes.

    compute    tanh | ........ mm ........ | mm | wait      the wait lets what is called next come behind the copy
    to host         | copy of tanh's value |                 behind all that was called before its start

A start puts its copy behind everything that was called on the device before, so it reads what was computed, and writes
where nothing is read any more; a wait puts what is called next behind the copy. The host blocks nowhere. Until its wait
a copy keeps both its ends. A buffer whose tensor is gone may still be read by a copy to the device: the next copy into
it runs behind that one.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.ops.host_copies import set_copies
from autopar.runtime.host_memory.host_budget import host_budget_bytes
from autopar.runtime.host_memory.pinned_pool import Buffer, CopyEvent, PinnedPool


class Streams(Protocol):
    """Queues of a device, one that computes and one per direction."""

    def start(
        self, direction: str, device: torch.device, target: Tensor, source: Tensor, after: CopyEvent | None
    ) -> CopyEvent:
        """Copy behind all that was called on the device so far, behind the copies of the direction, and `after`."""

    def wait(self, device: torch.device, event: CopyEvent) -> None:
        """What is called next on the device runs behind a copy."""


class CudaStreams:
    """Streams of CUDA."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, torch.device], Any] = {}

    def start(
        self, direction: str, device: torch.device, target: Tensor, source: Tensor, after: CopyEvent | None
    ) -> CopyEvent:
        """As of Streams."""
        if (direction, device) not in self._streams:
            self._streams[direction, device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[direction, device]
        stream.wait_stream(torch.cuda.current_stream(device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        ended: CopyEvent = stream.record_event()
        return ended

    def wait(self, device: torch.device, event: CopyEvent) -> None:
        """As of Streams."""
        torch.cuda.current_stream(device).wait_event(event)  # type: ignore[arg-type]


class StreamCopies:
    """A CopyEngine over streams and pinned memory."""

    def __init__(self, pool: PinnedPool, streams: Streams | None = None) -> None:
        self.pool = pool
        self._streams = streams or CudaStreams()
        self._flying: dict[int, tuple[CopyEvent, torch.device, Tensor, Tensor]] = {}

    def to_host(self, source: Tensor) -> Tensor:
        """Start; pinned memory. Raises HostMemoryError where the pool has no room."""
        target = self.pool.take(source)
        self._start("to_host", source.device, target, source, self.pool.buffer_of(target))
        return target

    def from_host(self, source: Tensor, device: torch.device) -> Tensor:
        """Start; memory of the device. What is not pinned blocks the host while it is copied."""
        target = torch.empty_like(source, device=device)
        self._start("from_host", target.device, target, source, self.pool.buffer_of(source))
        return target

    def wait(self, copied: Tensor) -> None:
        """What is called next on the device may read `copied`, and reuse what it was copied from."""
        flight = self._flying.pop(_key(copied), None)
        if flight is not None:
            event, device, _, _ = flight
            self._streams.wait(device, event)

    def settle(self, copied: Tensor) -> None:
        """Block until `copied` may be read by the host."""
        flight = self._flying.get(_key(copied))
        if flight is not None:
            flight[0].synchronize()

    def _start(
        self, direction: str, device: torch.device, target: Tensor, source: Tensor, buffer: Buffer | None
    ) -> None:
        """buffer: of the end on the host, where it is of the pool."""
        if not target.numel():
            return
        writes = buffer is not None and direction == "to_host"
        event = self._streams.start(direction, device, target, source, buffer.last_copy if writes and buffer else None)
        if buffer is not None:
            buffer.last_copy = event
        self._flying[_key(target)] = event, device, target, source


def copy_over_streams(budget_bytes: int | None = None) -> StreamCopies:
    """Let copies of CUDA devices run on streams, to pinned memory of at most `budget_bytes`; from now on, in all
    threads."""
    engine = StreamCopies(PinnedPool(budget_bytes))
    set_copies("cuda", engine)
    return engine


@functools.cache
def stream_copies() -> StreamCopies:
    """Copies of CUDA devices over streams, for all modules of this process, to as much pinned memory as plans count
    on."""
    return copy_over_streams(host_budget_bytes())


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
