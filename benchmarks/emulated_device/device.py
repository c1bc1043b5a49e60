"""An emulated device: a step runs on it as on an accelerator with so many bytes and such a link to its host.

    with EmulatedDevice(host_link("PCIe4"), device_bytes=256 << 20, known=model.parameters()) as device:
        model(**batch)["loss"].backward()
    device.budget.peak_bytes, device.budget.host_peak_bytes         # OutOfMemory where a limit is passed
    device.link.stall_seconds, device.link.overlap, device.link.copies

Counting every operator takes 10 to 20 us of each: seconds are measured without it (`counts=False`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import TracebackType

from torch import Tensor

from autopar.hardware.hosts import HostLink
from autopar.ops.host_copies import copies_by
from benchmarks.emulated_device.budget import Budget
from benchmarks.emulated_device.link import EmulatedLink


class EmulatedDevice:
    """A context manager. sharing: devices that copy over the link at once; device_bytes, host_bytes: limits (None:
    none); known: tensors that live on the device before it starts; counts: whether bytes are counted."""

    def __init__(
        self,
        link: HostLink,
        *,
        sharing: int = 1,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        known: Iterable[Tensor] = (),
        counts: bool = True,
    ) -> None:
        self.link = EmulatedLink(link, sharing)
        self.budget = Budget(device_bytes, host_bytes, known)
        self.counts = counts
        self._open = contextlib.ExitStack()

    def __enter__(self) -> EmulatedDevice:
        self._open.enter_context(self.link)
        self._open.enter_context(copies_by("cpu", self.link))
        if self.counts:
            self._open.enter_context(self.budget)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
