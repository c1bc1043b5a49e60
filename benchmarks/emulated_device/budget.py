"""Bytes that live on an emulated device and on its host, though both are memory of one process.

    with Budget(64 << 20, known=model.parameters()) as budget:
        step()                                   # OutOfMemory where the device would hold more than 64 MiB
    budget.peak_bytes, budget.host_peak_bytes

A value lies on the device, unless it was copied to the host, put there (`on_host`), or made of such values alone. What
reads both at once, other than a copy, is refused as a real device refuses it; numbers without dims are free to go
anywhere. What an operator allocates and frees inside is not seen.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.graphs.copy_nodes import COPY_FROM_HOST, COPY_TO_HOST, WAIT_COPY
from benchmarks.storages import local

_CROSS = frozenset({COPY_FROM_HOST, WAIT_COPY, torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default})
"""What reads one side and writes the other."""


class OutOfMemory(MemoryError):
    """A value that the device, or its host, has no room for."""


class Budget(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages while it is active. device_bytes, host_bytes: what may live on each side; None: anything."""

    def __init__(
        self, device_bytes: int | None = None, host_bytes: int | None = None, known: Iterable[Tensor] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limits = {"device": device_bytes, "host": host_bytes}
        self._side: dict[int, str] = {}
        self._size: dict[int, int] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._live = {"device": 0, "host": 0}
        self._peak = {"device": 0, "host": 0}
        self._lock = threading.RLock()  # storages end in the threads of the link, too
        for tensor in known:
            self._place(tensor, "device")

    @property
    def live_bytes(self) -> int:
        """On the device, now."""
        return self._live["device"]

    @property
    def peak_bytes(self) -> int:
        """Most that lived on the device at any operator."""
        return self._peak["device"]

    @property
    def host_live_bytes(self) -> int:
        """On the host, now."""
        return self._live["host"]

    @property
    def host_peak_bytes(self) -> int:
        """Most that lived on the host at any operator."""
        return self._peak["host"]

    def on_host(self, *tensors: Tensor) -> None:
        """These lie on the host from now on."""
        for tensor in tensors:
            self._move(tensor, "host")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [leaf for leaf in tree_leaves((args, kwargs)) if _counts(leaf)]
        for tensor in read:
            self._place(tensor, "device")
        side = self._side_of_result(function, read)
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _counts(leaf):
                self._place(leaf, side, str(function))
        return result

    def _side_of_result(self, function: Any, read: Iterable[Tensor]) -> str:
        if function is COPY_TO_HOST:
            return "host"
        sides = {self._side[_key(tensor)] for tensor in read if tensor.dim()}
        if function in _CROSS or not sides:
            return "device"
        if len(sides) > 1:
            raise RuntimeError(f"{function} reads values of the device and values of its host: copy them first")
        return sides.pop()

    def _place(self, tensor: Tensor, side: str, maker: str = "an input") -> None:
        """Count a storage that was not seen before."""
        storage = local(tensor).untyped_storage()
        key, size = int(storage._cdata), storage.nbytes()
        with self._lock:
            if key in self._side:
                return
            self._side[key], self._size[key] = side, size
            self._watch[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
            self._add(side, size)
        self._check(side, size, maker)

    def _move(self, tensor: Tensor, side: str) -> None:
        self._place(tensor, side)
        key = _key(tensor)
        with self._lock:
            self._live[self._side[key]] -= self._size[key]
            self._side[key] = side
            self._add(side, self._size[key])

    def _add(self, side: str, size: int) -> None:
        self._live[side] += size
        limit = self.limits[side]
        if limit is None or self._live[side] <= limit:
            self._peak[side] = max(self._peak[side], self._live[side])

    def _check(self, side: str, size: int, maker: str) -> None:
        limit, live = self.limits[side], self._live[side]
        if limit is not None and live > limit:
            raise OutOfMemory(
                f"{side} out of memory: {maker} takes {size:,} bytes where {live - size:,} of {limit:,} are in use"
            )

    def _forget(self, key: int) -> None:
        with self._lock:
            self._live[self._side.pop(key)] -= self._size.pop(key)
            del self._watch[key]


def _counts(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and local(leaf).device.type == "cpu" and type(local(leaf)) in (Tensor, _PARAMETER)


_PARAMETER = torch.nn.Parameter


def _key(tensor: Tensor) -> int:
    return int(local(tensor).untyped_storage()._cdata)
