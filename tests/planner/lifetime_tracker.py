"""The bytes that a lowered step really holds: its two graphs run node by node on real tensors, storages counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from autopar.graphs.forward_backward import Partition
from autopar.program import Program

c10d = torch.ops._c10d_functional


def tracked_peak_bytes(partition: Partition, lowered: Program) -> int:
    """Most bytes of all storages after any node of forward and backward, parameters not among them.

    Collectives give zeros of their result's shape: values are wrong then, lifetimes are not.
    """
    inputs = {node.name: entry for node, entry in zip(lowered.placeholders, lowered.inputs, strict=True)}
    values = {name: _empty(entry.shape, entry.dtype) for name, entry in inputs.items() if entry.role != "tangent"}
    parameters = {values[name].untyped_storage().data_ptr() for name in values if inputs[name].role == "parameter"}
    batch = [value for name, value in values.items() if inputs[name].role != "parameter"]
    peaks, results = _run(partition.forward, list(values.values()), parameters, batch)
    if partition.backward is None:
        return max(peaks)
    count = len(results) - len(partition.saved)
    tangents = [_empty(entry.shape, entry.dtype) for entry in inputs.values() if entry.role == "tangent"]
    saved, returned = results[count:], [value for value in results[:count] if isinstance(value, Tensor)]
    del results, values
    late, _ = _run(partition.backward, [*saved, *tangents], parameters, [*returned, *batch])
    return max(*peaks, *late)


def _run(
    module: fx.GraphModule, inputs: list[Any], parameters: set[int], outside: list[Tensor]
) -> tuple[list[int], list[Any]]:
    """(bytes after every node, outputs); a value is dropped behind its last reader, an input that `outside` does not
    hold as well."""
    values: dict[fx.Node, Any] = {}
    last = {operand: node for node in module.graph.nodes for operand in node.all_input_nodes}
    peaks, remaining = [], list(reversed(inputs))
    held = _Held(parameters)
    for value in [*remaining, *outside]:
        held.add(value)
    inputs.clear()
    for node in module.graph.nodes:
        if node.op == "output":
            return peaks, list(fx.map_arg(node.args[0], values.__getitem__))
        if node.op == "placeholder":
            values[node] = remaining.pop()
        else:
            values[node] = _call(node, values)
            held.add(values[node])
        peaks.append(held.bytes)
        for operand in node.all_input_nodes:
            if last[operand] is node:
                held.drop(values.pop(operand))
    raise AssertionError("graph without output")


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.target is c10d.wait_tensor.default:
        return args[0]
    if getattr(node.target, "namespace", "") == "_c10d_functional":
        return _empty(node.meta["local_shape"], node.meta["dtype"])
    if node.op == "get_attr":
        return getattr(node.graph.owning_module, str(node.target))
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _empty(shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.zeros(tuple(shape), dtype=dtype)


class _Held:
    """Bytes of the storages of all values that were added and not dropped, each storage once, but for parameters."""

    def __init__(self, parameters: set[int]) -> None:
        self.bytes = 0
        self._parameters = parameters
        self._holders: dict[int, int] = {}

    def add(self, value: Any) -> None:
        for storage in _storages(value):
            pointer = storage.data_ptr()
            self._holders[pointer] = self._holders.get(pointer, 0) + 1
            if self._holders[pointer] == 1 and pointer not in self._parameters:
                self.bytes += storage.nbytes()

    def drop(self, value: Any) -> None:
        for storage in _storages(value):
            pointer = storage.data_ptr()
            self._holders[pointer] -= 1
            if self._holders[pointer] == 0:
                del self._holders[pointer]
                self.bytes -= storage.nbytes() if pointer not in self._parameters else 0


def _storages(value: Any) -> Iterator[Any]:
    for tensor in value if isinstance(value, tuple | list) else (value,):
        if isinstance(tensor, Tensor):
            yield tensor.untyped_storage()
