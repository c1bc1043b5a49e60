"""Live ranges: which bytes of one rank live from which node of forward to which node of backward.

    x (8 B) made by node 0, read last by node 2;  y = view(x)            ->  [LiveRange("x", 8, 0, 2)]
    bytes_over_time([LiveRange("x", 8, 0, 2), LiveRange("y", 4, 1, 1)])   ->  8, 12, 8 bytes

What only looks at a value has no memory of its own; a collective's wait is the buffer of the collective, and what a
collective moves lives until its wait. What a node holds while it runs (`working_bytes.py`) has its name, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.graphs.collective_nodes import ALL_REDUCE, ALL_REDUCE_IN_PLACE, WAIT
from autopar.graphs.forward_backward import Partition
from autopar.graphs.node_values import VIEWS, is_getitem, node_bytes
from autopar.graphs.working_bytes import working_bytes
from autopar.ops.blocks import keeps_order, padded, pieces_first, pieces_joined
from autopar.program import returned_values

aten = torch.ops.aten
_ALIASES = VIEWS | {WAIT, ALL_REDUCE_IN_PLACE, padded, aten.contiguous.default}


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
    timeline = _Timeline()
    forward = timeline.add(partition.forward.graph, {}, partition.parameters)
    if partition.backward is not None:
        returned = returned_values(partition.forward.graph)[-len(partition.saved) :] if partition.saved else []
        placeholders = [node for node in partition.backward.graph.nodes if node.op == "placeholder"]
        saved = {p: forward[node] for p, node in zip(placeholders, returned, strict=False)}
        timeline.add(partition.backward.graph, saved, frozenset())
    return timeline.ranges(partition)


class _Timeline:
    """Buffers of several graphs that run one after the other; a node is read up to its last user."""

    def __init__(self) -> None:
        self._index = 0
        self._first: dict[fx.Node, int] = {}
        self._last: dict[fx.Node, int] = {}
        self._buffer: dict[fx.Node, fx.Node] = {}
        self._working: list[LiveRange] = []

    def add(self, graph: fx.Graph, known: dict[fx.Node, fx.Node], excluded: frozenset[str]) -> dict[fx.Node, fx.Node]:
        """Append a graph whose placeholders `known` live in earlier buffers; returns node -> its buffer."""
        buffers: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node.op == "output":
                break
            reads = [buffers[operand] for operand in node.all_input_nodes]
            begins = self._index
            if _is_one_of_several(node):  # lives by itself, and from where its operator ran
                begins, reads = self._first[reads[0]] + 1, []
            buffers[node] = known.get(node) or (reads[0] if reads and _is_alias(node) else node)
            if buffers[node] is node and not (node.op == "placeholder" and node.name in excluded):
                self._first[node] = begins
            for buffer in (*reads, *_in_flight(node, buffers), buffers[node]):
                self._last[buffer] = self._index
            if working := working_bytes(node):
                self._working.append(LiveRange(node.name, working, self._index, self._index))
            self._index += 1
        self._buffer.update(buffers)
        return buffers

    def ranges(self, partition: Partition) -> list[LiveRange]:
        count = len(partition.saved)
        outputs = returned_values(partition.forward.graph)
        left = returned_values(partition.backward.graph) if partition.backward else []
        kept = outputs[: len(outputs) - count] + left
        for node in kept:
            if isinstance(node, fx.Node):
                self._last[self._buffer[node]] = self._index
        values = [
            LiveRange(node.name, node_bytes(node), first, self._last[node])
            for node, first in self._first.items()
            if node_bytes(node)
        ]
        return [*values, *self._working]


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
