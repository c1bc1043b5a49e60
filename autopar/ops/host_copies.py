"""Copies of values to the memory of the host and back, started and awaited apart, as functional collectives are.

    parked = copy_to_host(x)               starts; the result lies in host memory
    parked = wait_copy(parked, x)          x may be freed, parked may be read by the next copy
    again = copy_from_host(parked, cuda)   starts
    again = wait_copy(again, parked)       parked may be freed, again may be read

A wait takes what was copied from, too: so a graph keeps that until the copy has ended (the idea of torch's
`ao::offload`, `ao::reload` and `ao::wait_tensor`, without freeing storages under other readers). Who copies is an
engine per kind of device: plain copies here; streams and pinned memory in `runtime/host_memory/stream_copies.py`, a
throttled link for CPUs that stand for accelerators in `benchmarks/emulated_device`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor


class CopyEngine(Protocol):
    """Who copies for one kind of device ("cuda", "cpu"). Copies of one direction end in the order of their starts."""

    def to_host(self, source: Tensor) -> Tensor:
        """Start; a tensor of host memory with the strides of a dense source."""

    def from_host(self, source: Tensor, device: torch.device) -> Tensor:
        """Start; a tensor of the device's memory."""

    def wait(self, copied: Tensor) -> None:
        """What is called next on the device, or copied next, may read what a start returned. Nothing where it may
        already."""


class PlainCopies:
    """Copies that have ended when their start returns."""

    def to_host(self, source: Tensor) -> Tensor:
        """A new tensor of the host."""
        return torch.empty_like(source, device="cpu").copy_(source)

    def from_host(self, source: Tensor, device: torch.device) -> Tensor:
        """A new tensor of the device."""
        return torch.empty_like(source, device=device).copy_(source)

    def wait(self, copied: Tensor) -> None:
        """Nothing is under way."""


_plain = PlainCopies()
_engines: dict[str, CopyEngine] = {}


def set_copies(device_type: str, engine: CopyEngine | None) -> CopyEngine | None:
    """Let an engine copy for a kind of device, in all threads (backward may run in others); None: plain copies.
    Returns the one before."""
    before = _engines.pop(device_type, None)
    if engine is not None:
        _engines[device_type] = engine
    return before


@contextlib.contextmanager
def copies_by(device_type: str, engine: CopyEngine | None) -> Iterator[None]:
    """Inside, the engine copies for a kind of device."""
    before = set_copies(device_type, engine)
    try:
        yield
    finally:
        set_copies(device_type, before)


def _engine(device: torch.device) -> CopyEngine:
    return _engines.get(device.type, _plain)


@torch.library.custom_op("autopar::copy_to_host", mutates_args=(), schema="(Tensor source) -> Tensor")
def copy_to_host(source: Tensor) -> Tensor:
    """Start a copy of `source` to host memory; `wait_copy` it."""
    return _engine(source.device).to_host(source)


@copy_to_host.register_fake
def _(source: Tensor) -> Tensor:
    return torch.empty_like(source, device=source.device if source.device.type == "meta" else "cpu")


@torch.library.custom_op(
    "autopar::copy_from_host", mutates_args=(), schema="(Tensor source, Device device) -> Tensor"
)
def copy_from_host(source: Tensor, device: torch.device) -> Tensor:
    """Start a copy of `source`, which lies in host memory, to a device; `wait_copy` it."""
    return _engine(device).from_host(source, device)


@copy_from_host.register_fake
def _(source: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(source, device=source.device if source.device.type == "meta" else device)


_library = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("wait_copy(Tensor(a) copied, Tensor source) -> Tensor(a)")  # type: ignore[no-untyped-call]
"""A custom operator may not return what it is given."""


@torch.library.impl(_library, "wait_copy", "CompositeExplicitAutograd")
def _wait_copy(copied: Tensor, source: Tensor) -> Tensor:
    device = source.device if copied.device.type == "cpu" else copied.device
    _engine(device).wait(copied)
    return copied


def _wait_nothing(copied: Tensor, source: Tensor) -> Tensor:
    return copied


torch.library.register_fake("autopar::wait_copy", _wait_nothing, lib=_library)


def wait_copy(copied: Tensor, source: Tensor) -> Tensor:
    """`copied` once the copy from `source` that returned it has ended, for what is called next."""
    waited: Tensor = torch.ops.autopar.wait_copy.default(copied, source)
    return waited


__all__ = [
    "CopyEngine",
    "PlainCopies",
    "copies_by",
    "copy_from_host",
    "copy_to_host",
    "set_copies",
    "wait_copy",
]
