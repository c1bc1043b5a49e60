"""Live ranges: which bytes of one rank live from which node of forward to which node of backward.

    x (8 B) made by node 0, read last by node 2;  y = view(x)            ->  [LiveRange("x", 8, 0, 2)]
    bytes_over_time([LiveRange("x", 8, 0, 2), LiveRange("y", 4, 1, 1)])   ->  8, 12, 8 bytes

What only looks at a value has no memory of its own; a collective's wait is the buffer of the collective, and what a
collective moves lives until its wait, as what is copied to the host does. What lies on the host is counted apart. What
a node holds while it runs (`working_bytes.py`) has its name, too. A group's symmetric memory has the name of the node
whose call needs most of it, and lives throughout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.graphs.collective_nodes import ALL_REDUCE, ALL_REDUCE_IN_PLACE, WAIT, is_start
from autopar.graphs.copy_nodes import COPY_TO_HOST, WAIT_COPY
from autopar.graphs.forward_backward import Partition
from autopar.graphs.node_values import VIEWS, is_getitem, node_bytes
from autopar.graphs.symmetric_sizes import symmetric_sizes
from autopar.graphs.working_bytes import working_bytes
from autopar.ops.blocks import keeps_order, padded, pieces_first, pieces_joined
from autopar.ops.symmetric_products import SYMMETRIC
from autopar.program import returned_values

aten = torch.ops.aten
_ALIASES = VIEWS | {WAIT, WAIT_COPY, ALL_REDUCE_IN_PLACE, padded, aten.contiguous.default, aten.add_.Tensor}


@dataclass(frozen=True, slots=True)
class LiveRange:
    """A buffer that lives from `first_index` (0 or later) to `last_index`, both included."""

    name: str
    bytes: int
    first_index: int
    last_index: int


def bytes_over_time(ranges: Sequence[LiveRange]) -> NDArray[np.int64]:
    """Live bytes at every index from 0 to the last one that a range names."""
    change = np.zeros(max((live.last_index for live in ranges), default=-1) + 2, np.int64)
    for live in ranges:
        change[live.first_index] += live.bytes
        change[live.last_index + 1] -= live.bytes
    return np.cumsum(change)[:-1]


def memory_events(partition: Partition) -> list[LiveRange]:
    """Live ranges over the nodes of forward, then backward: activations, saved values, gathered parameters, gradients
    and inputs; not the stored parameters. Indices count nodes; returned values live to the end."""
    return _whole_timeline(partition).ranges()


def host_memory_events(partition: Partition) -> list[LiveRange]:
    """As `memory_events`, of what forward and backward copy to the host."""
    return _whole_timeline(partition).ranges(on_host=True)


def _whole_timeline(partition: Partition) -> _Timeline:
    timeline = _Timeline()
    timeline.add_passes(partition)
    timeline.keep((*_returned(partition)[0], *_backward_returns(partition)), timeline.index)
    return timeline


def stage_memory_events(
    partition: Partition, weights: fx.GraphModule | None = None, kept: Sequence[fx.Node] = ()
) -> list[LiveRange]:
    """`memory_events` of a stage of a pipeline, where what a pass returns is on its way to other stages behind it.

    weights: the other half of a backward of which the partition has one, whose nodes are counted next; it takes what
    the first half keeps (`kept`, of its nodes).
    """
    timeline = _Timeline()
    forward_end, backward = timeline.add_passes(partition)
    timeline.keep(_returned(partition)[0], forward_end - 1)
    timeline.keep(_backward_returns(partition), timeline.index - 1)
    if weights is not None:
        placeholders = [node for node in weights.graph.nodes if node.op == "placeholder"]
        taken = {p: backward[node] for p, node in zip(placeholders, kept, strict=False)}
        timeline.add(weights.graph, taken, frozenset())
    return timeline.ranges()


def _returned(partition: Partition) -> tuple[list[Any], list[Any]]:
    """(mutations and outputs, saved values) of forward."""
    returned = returned_values(partition.forward.graph)
    outputs = len(returned) - len(partition.saved)
    return returned[:outputs], returned[outputs:]


def _backward_returns(partition: Partition) -> list[Any]:
    return [] if partition.backward is None else returned_values(partition.backward.graph)


class _Timeline:
    """Buffers of several graphs that run one after the other; a node is read up to its last user."""

    def __init__(self) -> None:
        self.index = 0
        """How many nodes there are so far."""
        self._first: dict[fx.Node, int] = {}
        self._last: dict[fx.Node, int] = {}
        self._buffer: dict[fx.Node, fx.Node] = {}
        self._working: list[LiveRange] = []
        self._mapped: dict[str, tuple[int, str]] = {}
        """Group -> (bytes of its symmetric memory, the node that needs most of it)."""

    def add(self, graph: fx.Graph, known: dict[fx.Node, fx.Node], excluded: frozenset[str]) -> dict[fx.Node, fx.Node]:
        """Append a graph whose placeholders `known` live in earlier buffers; returns node -> its buffer."""
        buffers: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node.op == "output":
                break
            reads = [buffers[operand] for operand in node.all_input_nodes]
            begins = self.index
            if _is_one_of_several(node):  # lives by itself, and from where its operator ran
                begins, reads = self._first[reads[0]] + 1, []
            buffers[node] = known.get(node) or (reads[0] if reads and _is_alias(node) else node)
            if buffers[node] is node and not (node.op == "placeholder" and node.name in excluded):
                self._first[node] = begins
            for buffer in (*reads, *_in_flight(node, buffers), buffers[node]):
                self._last[buffer] = self.index
            if working := working_bytes(node):
                self._working.append(LiveRange(node.name, working, self.index, self.index))
            if node.target in SYMMETRIC:
                mapped = (symmetric_sizes(node).mapped_bytes, node.name)
                self._mapped[str(node.args[-1])] = max(mapped, self._mapped.get(str(node.args[-1]), (0, "")))
            self.index += 1
        self._buffer.update(buffers)
        return buffers

    def add_passes(self, partition: Partition) -> tuple[int, dict[fx.Node, fx.Node]]:
        """Forward, and backward where there is one; (nodes of forward, node of backward -> its buffer)."""
        forward = self.add(partition.forward.graph, {}, partition.parameters)
        end = self.index
        if partition.backward is None:
            return end, {}
        placeholders = [node for node in partition.backward.graph.nodes if node.op == "placeholder"]
        saved = {p: forward[node] for p, node in zip(placeholders, _returned(partition)[1], strict=False)}
        return end, self.add(partition.backward.graph, saved, frozenset())

    def keep(self, values: Iterable[Any], last: int) -> None:
        """What is returned lives up to an index at least, and with a collective that goes on what it reads."""
        for node in values:
            if not isinstance(node, fx.Node):
                continue
            read = node.all_input_nodes if is_start(node) and node.target is not ALL_REDUCE else ()
            for buffer in {self._buffer[each] for each in (node, *read)}:
                self._last[buffer] = max(self._last[buffer], last)

    def ranges(self, on_host: bool = False) -> list[LiveRange]:
        """Of all buffers that take memory of the device, or of the host."""
        values = [
            LiveRange(node.name, node_bytes(node), first, self._last[node])
            for node, first in self._first.items()
            if node_bytes(node) and (node.target is COPY_TO_HOST) == on_host
        ]
        if on_host:
            return values
        end = max(self._last.values(), default=0)
        mapped = [LiveRange(name, size, 0, end) for size, name in self._mapped.values()]
        return [*values, *self._working, *mapped]


def _in_flight(node: fx.Node, buffers: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """What a collective reads up to its wait; an all_reduce works on a copy of its own."""
    if node.target is not WAIT or node.all_input_nodes[0].target is ALL_REDUCE:
        return []
    return [buffers[operand] for operand in node.all_input_nodes[0].all_input_nodes]


def _is_alias(node: fx.Node) -> bool:
    if node.target is padded:
        source = node.args[0]
        return isinstance(source, fx.Node) and source.meta.get("local_shape") == node.meta.get("local_shape")
    if node.target in (pieces_first, pieces_joined):
        return _moves_nothing(node)
    return bool(node.all_input_nodes) and (node.target in _ALIASES or is_getitem(node) or _is_view(node))


def _moves_nothing(node: fx.Node) -> bool:
    """Whether the pieces of a collective lie where they belong, without padding: its buffer is the value itself."""
    arguments: tuple[Any, ...] = node.args
    source, cuts, padded_shape = arguments[:3]
    shape = node.meta["local_shape"] if node.target is pieces_joined else source.meta.get("local_shape")
    return bool(shape == padded_shape and keeps_order(padded_shape, cuts))


def _is_view(node: fx.Node) -> bool:
    return bool(getattr(node.target, "is_view", False))


def _is_one_of_several(node: fx.Node) -> bool:
    """Whether a node takes an output with memory of its own from an operator with several."""
    return is_getitem(node) and not _is_view(node.all_input_nodes[0])
