"""The record of a step: every operator that runs, on which device, and every storage from its birth to its end.

    with Recorder() as recorder:
        recorder.run(node, torch.mm, (x, w), {})
    recorder.calls            # Call("mm", node, devices=("cuda",), launches=True, ...)
    recorder.storages         # Storage(8192 bytes, made by node, born at call 0, ended at call 4)

Operators of autopar run their implementation for CUDA, so that what they call is seen too; one with a Triton kernel
(`runtime/kernels/registry.py`) is that kernel, whose results alone are memory. What a collective reads is kept until
its wait, as NCCL's work objects keep it; fake collectives forget it at once. Copies to the host and back run on streams
of their own, and nobody waits for them but the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar._compat import custom_implementation
from autopar.graphs.collective_nodes import ALL_REDUCE, ALL_REDUCE_IN_PLACE, WAIT
from autopar.graphs.copy_nodes import HOST_COPIES, WAIT_COPY
from autopar.graphs.operator_names import base_name
from autopar.graphs.working_bytes import WITH_BUFFERS
from autopar.runtime.kernels.registry import KERNELS

_NO_KERNEL = frozenset([
    "alias", "detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty", "new_empty_strided",
    "_unsafe_view", "_reshape_alias", "set_", "resize_"
])  # fmt: skip
"""Operators that compute nothing, beside views."""
_OPAQUE = frozenset(["recurrent_layer_backward"])
"""Operators of ours that differentiate a function, whose tensors cannot be fake: their results alone are seen."""
_SYNCHRONISING = frozenset([
    "_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "equal", "is_nonzero", "bincount", "ctc_loss", "ctc_loss_backward"
])  # fmt: skip
"""Operators whose answer, or the size of whose answer, the host waits for."""


Form: TypeAlias = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operator. turn: of `Recorder.turns`, in which it runs, None: in none; launches: whether it is a kernel;
    waits: whether the host waits for its result."""

    name: str
    turn: int | None
    devices: tuple[str, ...]
    launches: bool
    waits: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of a node, and the tensors that it returned: (shape, dtype), None where it returned no tensor."""

    node: fx.Node
    results: tuple[Form | None, ...]


@dataclass(slots=True, kw_only=True)
class Storage:
    """Bytes from the call `born` up to and without the call `ended` (None: they outlive the record)."""

    bytes: int
    turn: int | None
    born: int
    ended: int | None = None


class Recorder(TorchDispatchMode):
    """Watches what runs while it is active; `meet` tells it of tensors that are there before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.storages: list[Storage] = []
        self.turns: list[Turn] = []
        self._turn: int | None = None
        self._known: set[int] = set()
        self._in_flight: dict[int, list[Tensor]] = {}

    def run(self, node: fx.Node, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a node computes; what runs for it belongs to its turn."""
        self._turn = len(self.turns)
        self.turns.append(Turn(node, ()))
        result = target(*args, **kwargs)
        self.turns[self._turn] = Turn(node, _forms(result))
        self._turn = None
        return result

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "prim":  # what Python asks of a tensor
            return function(*args, **kwargs)
        inner = _inside(function, args)
        if inner is not None:
            before = len(self.calls)
            with self:
                result = inner(*args, **kwargs)
            if not any(call.launches for call in self.calls[before:]) and base_name(function) in WITH_BUFFERS:
                self._called(function, _tensors((args, kwargs)), _tensors(result))
            return result
        is_wait = function in (WAIT, WAIT_COPY)
        result = args[0] if is_wait else function(*args, **kwargs)  # a fake wait makes a second tensor
        given, made = _tensors((args, kwargs)), _tensors(result)
        self._keep_in_flight(function, given, made)
        for tensor in made:
            self.meet(tensor)
        self._called(function, given, made)
        return result

    def _called(self, function: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        name = base_name(function)
        devices = {tensor.device.type for tensor in (*given, *made)}
        is_copy = function in HOST_COPIES
        is_kernel = not (is_copy or function.is_view or name in _NO_KERNEL or function.namespace == "_c10d_functional")
        self.calls.append(
            Call(
                name=name,
                turn=self._turn,
                devices=tuple(sorted(devices)),
                launches=is_kernel,
                waits=name in _SYNCHRONISING or (len(devices) > 1 and not is_copy),
            )
        )

    def meet(self, tensor: Tensor) -> None:
        """Watch the storage of a tensor, if it is not known; memory of the host is no matter of the device."""
        if tensor.device.type == "cpu":
            return
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps the Python object of a storage as long as the storage
        if key in self._known:
            return
        self._known.add(key)
        met = Storage(bytes=storage.nbytes(), turn=self._turn, born=len(self.calls))
        self.storages.append(met)
        weakref.finalize(storage, self._end, key, met)

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


def _forms(result: Any) -> tuple[Form | None, ...]:
    values = result if isinstance(result, tuple | list) else (result,)
    return tuple((tuple(v.shape), v.dtype) if isinstance(v, Tensor) else None for v in values)


def _inside(function: Any, args: Any) -> Any:
    """The Python implementation of an operator of ours for CUDA; None where it is a kernel itself."""
    if function.namespace != "autopar":
        return None
    if base_name(function) in _OPAQUE or function in HOST_COPIES:
        return None
    if base_name(function) in WITH_BUFFERS:
        return WITH_BUFFERS[base_name(function)]
    kernel = KERNELS.kernels.get(base_name(function))
    if kernel is None:
        return custom_implementation(function)
    return kernel.reference if kernel.refusal(*args) else None
