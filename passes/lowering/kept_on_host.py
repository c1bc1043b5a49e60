"""Host copies: what waits in the memory of the host is brought to the device where it is read, and back.

    forward(w on the host, x)     w_here = wait(from_host(w));  y = mm(x, w_here)      saves x, w as it came
                                  h = to_host(y);  wait(h, y)                           saves h: y itself ends here
    backward(w, h, dy)            y = wait(from_host(h)), in front of its first reader

Each graph brings what it reads for itself, so nothing that lies on the host is held by the device between them. Copies
stand where they are needed; `passes/overlap/copies_ahead.py` lets them begin earlier and end later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar._compat import LazyGraphModule
from autopar.graphs.copy_nodes import COPY_FROM_HOST, COPY_TO_HOST, WAIT_COPY
from autopar.graphs.forward_backward import Partition
from autopar.graphs.graph_copies import copied
from autopar.program import returned_values


def with_host_copies(partition: Partition, inputs: Collection[str], saved_of: Collection[str]) -> Partition:
    """The graphs, which are written into, with copies between device and host.

    inputs: names of placeholders of forward that lie on the host; saved_of: operators whose saved values wait there,
    those of other stages among them, whose values arrive as inputs.
    """
    for node in _placeholders(partition.forward, inputs):
        _bring(node)
    returned = returned_values(partition.forward.graph)
    first = len(returned) - len(partition.saved)
    values, saved = returned[first:], list(partition.saved)
    for index, (node, value) in enumerate(zip(values, partition.saved, strict=True)):
        if node.meta.get("operator") in saved_of:
            values[index] = _send(node)
            saved[index] = replace(value, is_input=False, on_host=True)
    partition.forward.graph.output_node().args = ((*returned[:first], *values),)
    if partition.backward is not None:
        taken = [node for node in partition.backward.graph.nodes if node.op == "placeholder"]
        for node, value in zip(taken, saved, strict=False):
            if value.name in inputs if value.is_input else value.on_host:
                _bring(node)
    for graph in partition.graphs:
        graph.recompile()
    return replace(partition, saved=tuple(saved))


def with_gradients_sent(backward: fx.GraphModule, going: Sequence[bool]) -> fx.GraphModule:
    """A copy of the graph that sends gradients to the host. going: which of what it returns. They go as autograd keeps
    them, which would else copy transposed ones there."""
    graph = copied(backward.graph)
    returned = zip(returned_values(graph), going, strict=True)
    graph.output_node().args = (
        tuple(_send(_contiguous(node)) if goes and isinstance(node, fx.Node) else node for node, goes in returned),
    )
    return LazyGraphModule(backward, graph)


def _contiguous(value: fx.Node) -> fx.Node:
    return _call(torch.ops.aten.contiguous.default, (value,), value, value.next)


def _placeholders(module: fx.GraphModule, names: Collection[str]) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder" and node.name in names]


def _bring(held: fx.Node) -> None:
    """Bring what lies on the host to the device, in front of the first call that reads it."""
    readers = [user for user in held.users if user.op != "output"]
    if not readers:
        return
    first = min(readers)
    started = _call(COPY_FROM_HOST, (held,), held, first, device=torch.device("cpu"))
    here = _call(WAIT_COPY, (started, held), held, first)
    for reader in readers:
        reader.replace_input_with(held, here)
    for node in (started, here):
        node.meta |= {"phase": first.meta["phase"]}


def _send(value: fx.Node) -> fx.Node:
    """Send a value to the host as soon as it is there; returns it there."""
    behind = value.next
    while behind.op == "placeholder":
        behind = behind.next
    started = _call(COPY_TO_HOST, (value,), value, behind)
    return _call(WAIT_COPY, (started, value), value, behind)


def _call(
    target: Callable[..., Any], args: tuple[fx.Node, ...], value: fx.Node, point: fx.Node, **options: Any
) -> fx.Node:
    """A call in front of `point` that copies a value."""
    with point.graph.inserting_before(point):
        node = point.graph.call_function(target, args, options)
    node.meta = {key: value.meta[key] for key in ("local_shape", "dtype", "phase", "operator")}
    return node
