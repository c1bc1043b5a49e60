"""The record of a step: every operator that runs, on which device, and every storage from its birth to its end.

    with Recorder() as recorder:
        with recorder.inside(node): torch.mm(x, w)
    recorder.calls            # Call("mm", node, devices=("cuda",), made=(8192,))
    recorder.storages         # Storage(8192 bytes, made by node, born at call 0, ended at call 4)

Operators of autopar run their implementation for CUDA, so that what they call is seen too; one with a Triton kernel
(`runtime/kernels/registry.py`) is that kernel, whose results alone are memory. What a collective reads is kept until
its wait, as NCCL's work objects keep it; fake collectives forget it at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar._compat import custom_implementation
from autopar.graphs.collective_nodes import ALL_REDUCE, ALL_REDUCE_IN_PLACE, WAIT
from autopar.graphs.operator_names import base_name
from autopar.runtime.kernels.registry import KERNELS
from benchmarks.fake_cuda.tensors import ByOperator

_NO_KERNEL = frozenset(
    ["alias", "detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty", "new_empty_strided"]
    + ["_unsafe_view", "_reshape_alias", "set_", "resize_"]
)
"""Operators that compute nothing, beside views."""
_SYNCHRONISING = frozenset(
    ["_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"]
    + ["equal", "is_nonzero", "bincount"]
)
"""Operators whose answer, or the size of whose answer, the host waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operator. node: of the emitted graph, None: outside of it; made: bytes of every storage that it makes;
    launches: whether it is a kernel; is_collective; waits: whether the host waits for its result."""

    name: str
    node: fx.Node | None
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    made: tuple[int, ...]
    launches: bool
    is_collective: bool
    waits: bool


@dataclass(slots=True, kw_only=True)
class Storage:
    """Bytes from the call `born` up to and without the call `ended` (None: they outlive the record)."""

    bytes: int
    node: fx.Node | None
    born: int
    ended: int | None = None


class Recorder(TorchDispatchMode):
    """Watches what runs while it is active; `meet` tells it of tensors that are there before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.storages: list[Storage] = []
        self._node: fx.Node | None = None
        self._known: set[int] = set()
        self._in_flight: dict[int, list[Tensor]] = {}

    @contextmanager
    def inside(self, node: fx.Node) -> Iterator[None]:
        """What runs belongs to this node."""
        before, self._node = self._node, node
        try:
            yield
        finally:
            self._node = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inner = _inside(function, args)
        if inner is not None:
            with self, ByOperator():
                return inner(*args, **kwargs)
        result = function(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(result)
        self._keep_in_flight(function, given, made)
        sizes = tuple(size for tensor in made if (size := self.meet(tensor)))
        name = base_name(function)
        devices = {tensor.device.type for tensor in (*given, *made)}
        is_collective = function.namespace == "_c10d_functional"
        self.calls.append(
            Call(
                name=name,
                node=self._node,
                devices=tuple(sorted(devices)),
                dtypes=tuple(tensor.dtype for tensor in made),
                made=sizes,
                launches=not (function.is_view or name in _NO_KERNEL or is_collective),
                is_collective=is_collective and function is not WAIT,
                waits=name in _SYNCHRONISING or len(devices) > 1,
            )
        )
        return result

    def meet(self, tensor: Tensor) -> int:
        """The bytes of a storage that was not known, else 0."""
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps the Python object of a storage as long as the storage
        if key in self._known:
            return 0
        self._known.add(key)
        met = Storage(bytes=storage.nbytes(), node=self._node, born=len(self.calls))
        self.storages.append(met)
        weakref.finalize(storage, self._end, key, met)
        return met.bytes

    def _end(self, key: int, storage: Storage) -> None:
        self._known.discard(key)
        storage.ended = len(self.calls)

    def _keep_in_flight(self, function: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        if function is WAIT:
            self._in_flight.pop(id(given[0].untyped_storage()), None)
        elif function.namespace == "_c10d_functional" and function not in (ALL_REDUCE, ALL_REDUCE_IN_PLACE):
            for tensor in made:
                self._in_flight[id(tensor.untyped_storage())] = list(given)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _inside(function: Any, args: Any) -> Any:
    """The Python implementation of an operator of ours for CUDA; None where it is a kernel itself."""
    if function.namespace != "autopar":
        return None
    kernel = KERNELS.kernels.get(base_name(function))
    if kernel is None:
        return custom_implementation(function)
    return kernel.reference if kernel.refusal(*args) else None
