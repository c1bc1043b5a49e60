"""The link between an emulated device and its host: a thread per direction, which copies no faster than a `HostLink`.

    link = EmulatedLink(host_link("PCIe4", devices_per_link=2), sharing=2)
    with link, copies_by("cpu", link):
        step()                    # what it starts with copy_to_host and copy_from_host runs beside it
    link.copies[0].seconds, link.stall_seconds

A copy takes the link's latency and then the time of its bytes, at a lower rate while the other direction is busy, too
(`cost_models/copy_costs.py`). Copies of one direction run in the order of their starts. The bytes are really copied, so
a step computes what it computes on a device, and no copy is faster than this machine.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from autopar.cost_models.copy_costs import link_rate
from autopar.graphs.copy_nodes import Direction
from autopar.hardware.hosts import HostLink

SLICE_SECONDS = 1e-3
"""How often a copy looks whether the other direction is busy."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that has ended; seconds of `time.perf_counter`."""

    direction: Direction
    nbytes: int
    asked: float
    """When its start was called."""
    began: float
    """When those before it had ended."""
    ended: float

    @property
    def seconds(self) -> float:
        """On the link."""
        return self.ended - self.began


class _Job:
    def __init__(self, direction: Direction, source: Tensor, result: Tensor) -> None:
        self.direction, self.source, self.result = direction, source, result
        self.asked = time.perf_counter()
        self.done = threading.Event()
        self.error: BaseException | None = None


class EmulatedLink:
    """Copies for `copies_by("cpu", ...)`, while it is entered. sharing: devices that copy over it at once, each of
    which gets its part of the rates."""

    def __init__(self, link: HostLink, sharing: int = 1) -> None:
        self.link, self.sharing = link, sharing
        self.copies: list[Copy] = []
        """Those that have ended, in the order of their ends."""
        self.stalls: list[tuple[float, float]] = []
        """(begin, end) of what a step waited for copies."""
        self._lanes: dict[Direction, _Lane] = {}
        self._pending: dict[int, _Job] = {}

    def __enter__(self) -> EmulatedLink:
        self._lanes = {"to_host": _Lane(self._carry), "from_host": _Lane(self._carry)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lane in self._lanes.values():
            lane.end()
        self._lanes = {}

    @property
    def stall_seconds(self) -> float:
        """What a step waited for copies."""
        return sum(end - begin for begin, end in self.stalls)

    @property
    def overlap(self) -> float:
        """Part of the time in which something is copied for which no step waited; 1 where nothing was copied."""
        copying = covered([(copy.began, copy.ended) for copy in self.copies])
        if not copying:
            return 1.0
        waited = covered([(copy.began, copy.ended) for copy in self.copies], within=self.stalls)
        return 1.0 - waited / copying

    def bytes_copied(self, direction: Direction) -> int:
        """Of all copies that have ended."""
        return sum(copy.nbytes for copy in self.copies if copy.direction == direction)

    def to_host(self, source: Tensor) -> Tensor:
        """Start; a tensor that the copy fills."""
        return self._start("to_host", source)

    def from_host(self, source: Tensor, device: torch.device) -> Tensor:
        """Start; a tensor that the copy fills."""
        return self._start("from_host", source)

    def wait(self, copied: Tensor) -> None:
        """Block until the copy that fills `copied` has ended; raises what it raised."""
        job = self._pending.get(_key(copied))
        if job is None:
            return
        begin = time.perf_counter()
        job.done.wait()
        self.stalls.append((begin, time.perf_counter()))
        if job.error is not None:
            raise job.error

    def _start(self, direction: Direction, source: Tensor) -> Tensor:
        assert self._lanes, "enter the link before something is copied over it"
        result = torch.empty_like(source)
        if result.numel():
            job = _Job(direction, source, result)
            self._pending[_key(result)] = job
            self._lanes[direction].jobs.put(job)
        return result

    def _carry(self, job: _Job) -> None:
        """Copy, and take as long as the link does; the job is forgotten once it has ended."""
        began = time.perf_counter()
        try:
            job.result.copy_(job.source)
            nbytes = job.source.numel() * job.source.element_size()
            self._sleep(began + self.link.latency_seconds, nbytes, job.direction)
            self.copies.append(Copy(job.direction, nbytes, job.asked, began, time.perf_counter()))
        except BaseException as error:  # handed to the step, which waits for it
            job.error = error
        else:
            del self._pending[_key(job.result)]
        finally:
            job.done.set()

    def _sleep(self, now: float, nbytes: float, direction: Direction) -> None:
        """Until `nbytes` that begin to move at `now` have moved."""
        other = self._lanes["from_host" if direction == "to_host" else "to_host"]
        while nbytes > 0.0:
            rate = link_rate(self.link, direction, both_ways=other.is_busy) / self.sharing
            moved = min(nbytes, rate * SLICE_SECONDS)
            nbytes -= moved
            now += moved / rate
            time.sleep(max(0.0, now - time.perf_counter()))


class _Lane:
    """A thread that carries one job after the other."""

    def __init__(self, carry: Callable[[_Job], None]) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.is_busy = False
        self._carry = carry
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Carry what was asked for, then stop."""
        self.jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            self.is_busy = True
            with contextlib.suppress(KeyError):
                self._carry(job)
            self.is_busy = not self.jobs.empty()
            del job  # its tensors may be freed


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def covered(
    intervals: Sequence[tuple[float, float]], within: Sequence[tuple[float, float]] | None = None
) -> float:
    """Length of the union of `intervals`; of its part inside the union of `within`."""
    if within is None:
        length, reached = 0.0, float("-inf")
        for begin, end in sorted(intervals):
            length += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return length
    return covered(intervals) + covered(within) - covered([*intervals, *within])
