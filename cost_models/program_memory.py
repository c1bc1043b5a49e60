"""Bytes of a lowered program, segment by segment: what a pipeline stage of any number of layers is composed of.

A program of embedding, one layer of each kind and head runs forward and backward once; every buffer has a live range
(`passes/live_ranges.py`). A buffer that backward reads belongs to the segment in which it dies: the input of a layer
to that layer, wherever it was made. What a segment holds beyond that while it runs is its extra:

    saved(S)          = sum of the buffers that live from forward to backward and die in S
    forward extra(S)  = max over forward nodes i of S  of  live(i) - sum of saved up to S
    backward extra(S) = max over backward nodes i of S of  live(i) - sum of saved up to S

so that forward through layer k of a stage peaks at k x saved(layer) + forward extra(layer). Gradients of parameters
count where they are made and then leave: what collects them is a state (`model_states.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.cost_models.allocator import rounded_bytes
from autopar.cost_models.fused_kernels import made_again, unwritten
from autopar.cost_models.memory import LiveRange, bytes_over_time
from autopar.passes.live_ranges import memory_events
from autopar.passes.partition import Partition, split_forward_backward
from autopar.program import Program

SegmentOf = Callable[[str], str]
"""Name of an operator or parameter -> the segment that it is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMemory:
    """What one segment holds on one device for one micro-batch, in bytes; parameters in elements."""

    name: str
    parameter_elements: int = 0
    saved_bytes: int = 0
    border_bytes: int = 0
    """The activation that it takes from the segment before it."""
    forward_extra_bytes: int = 0
    backward_extra_bytes: int = 0
    largest_gradient_bytes: int = 0
    """Of the parameter whose gradient takes most."""
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Parameter -> local elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBytes:
    """Bytes per logit of a stack's cross entropy: kept for backward, and the peaks of both passes with the logits
    and their gradient themselves."""

    saved: int
    forward: int
    backward: int


def measure_segments(
    program: Program,
    segment_of: SegmentOf,
    *,
    recompute: Collection[str] = (),
    fused: bool = False,
    loss: LossBytes | None = None,
) -> dict[str, SegmentMemory]:
    """Segment -> its bytes, in the order in which forward runs them.

    program: lowered for one rank, with one micro-batch. recompute: operators that backward runs again. fused: chains of
    pointwise operators are one kernel each (`fused_kernels.py`), else every operator writes its value. loss: what the
    stack's cross entropy keeps, where its kernels are not those of the graph: all values as large as the logits then
    count by it. Every buffer is rounded as the caching allocator does.
    """
    again = {*recompute, *(made_again(program.graph) if fused else ())}
    partition = split_forward_backward(program, again)
    timeline = _Timeline(partition, segment_of, fused=fused)
    logits = _logits(partition.forward.graph, segment_of) if loss is not None else None
    found = timeline.segments(logits)
    for name, elements in _parameters(program, segment_of).items():
        found[name] = replace(found[name], parameter_elements=sum(elements.values()), parameters=dict(elements))
    if loss is not None and logits is not None:
        last = segment_of(str(logits.meta["operator"]))
        found[last] = _with_loss(found[last], _elements(logits), loss)
    return found


def _with_loss(head: SegmentMemory, logits: int, loss: LossBytes) -> SegmentMemory:
    """The head with the values of the cross entropy, which were left out."""
    saved = rounded_bytes(loss.saved * logits)
    return replace(
        head,
        saved_bytes=head.saved_bytes + saved,
        forward_extra_bytes=max(head.forward_extra_bytes, loss.forward * logits) - saved,
        backward_extra_bytes=max(head.backward_extra_bytes, loss.backward * logits - saved),
    )


def _logits(graph: fx.Graph, segment_of: SegmentOf) -> fx.Node | None:
    """The product whose result the loss reads: the last one of forward."""
    products = [node for node in graph.nodes if "mm" in _target_name(node).split(".")]
    return products[-1] if products else None


def _target_name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.") if node.op == "call_function" else ""


def _elements(node: fx.Node) -> int:
    return int(np.prod(node.meta["local_shape"], dtype=np.int64))


def _parameters(program: Program, segment_of: SegmentOf) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for entry in program.inputs:
        if entry.role == "parameter":
            elements = int(np.prod(entry.shape, dtype=np.int64))
            found.setdefault(segment_of(entry.name), {})[entry.name] = elements
    return found


class _Timeline:
    """The nodes of forward, then backward, each in its segment, and the buffers that live over them."""

    def __init__(self, partition: Partition, segment_of: SegmentOf, *, fused: bool) -> None:
        self._forward_nodes = _nodes(partition.forward.graph)
        backward = _nodes(partition.backward.graph) if partition.backward is not None else []
        self._nodes = [*self._forward_nodes, *backward]
        self._segments = _segments(self._forward_nodes, backward, segment_of)
        self._end = len(self._nodes)
        graphs = [partition.forward.graph, *([partition.backward.graph] if partition.backward is not None else [])]
        inside = frozenset[str]().union(*(unwritten(graph) for graph in graphs)) if fused else frozenset[str]()
        self._node_of = {node.name: node for node in [*backward, *self._forward_nodes]}
        gradients = (
            {node.name for node in partition.backward.graph.output_node().all_input_nodes} if backward else set()
        )
        inputs = {node.name for node in self._forward_nodes if node.op == "placeholder"}
        self._ranges = [
            replace(live, bytes=rounded_bytes(live.bytes), last_index=self._last(live, gradients))
            for live in memory_events(partition)
            if live.name not in inputs and not (live.name in inside and self._stays_in_a_pass(live))
        ]

    def _stays_in_a_pass(self, live: LiveRange) -> bool:
        turn = len(self._forward_nodes)
        return live.first_index >= turn or live.last_index < turn

    def _last(self, live: LiveRange, gradients: set[str]) -> int:
        """A finished gradient leaves behind the node that made it."""
        if live.name in gradients and live.first_index >= len(self._forward_nodes):
            return live.first_index
        return min(live.last_index, self._end - 1)

    def segments(self, logits: fx.Node | None) -> dict[str, SegmentMemory]:
        """What every segment holds; values as large as `logits` in its segment are left out."""
        left_out = self._as_large_as(logits) if logits is not None else frozenset[str]()
        ranges = [live for live in self._ranges if live.name not in left_out]
        turn = len(self._forward_nodes)
        saved: dict[str, int] = dict.fromkeys(self._segments, 0)
        borders: dict[str, int] = dict.fromkeys(saved, 0)
        for live in ranges:
            if live.first_index < turn <= live.last_index:
                home = self._segments[live.last_index]
                saved[home] += live.bytes
                if self._segments[live.first_index] != home:
                    borders[home] = max(borders[home], live.bytes)
        over_time = bytes_over_time(ranges, 0)
        before = dict(zip(saved, np.cumsum(list(saved.values())).tolist(), strict=True))
        gradients = self._largest_gradients()
        return {
            name: SegmentMemory(
                name=name,
                saved_bytes=saved[name],
                border_bytes=borders[name],
                forward_extra_bytes=self._extra(over_time[:turn], self._segments[:turn], name, before[name]),
                backward_extra_bytes=self._extra(over_time[turn:], self._segments[turn:], name, before[name]),
                largest_gradient_bytes=gradients.get(name, 0),
            )
            for name in saved
        }

    def _as_large_as(self, logits: fx.Node) -> frozenset[str]:
        home = self._segments[self._nodes.index(logits)]
        elements = _elements(logits)
        return frozenset(
            live.name
            for live in self._ranges
            if self._segments[live.first_index] == home
            and (node := self._node_of.get(live.name)) is not None
            and isinstance(node.meta.get("local_shape"), Sequence)
            and all(isinstance(size, int) for size in node.meta["local_shape"])
            and _elements(node) == elements
        )

    def _extra(self, over_time: NDArray[np.int64], segments: Sequence[str], name: str, saved: int) -> int:
        inside = [held for held, home in zip(over_time.tolist(), segments, strict=False) if home == name]
        return max(0, max(inside, default=0) - saved)

    def _largest_gradients(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for live in self._ranges:
            if live.first_index == live.last_index >= len(self._forward_nodes):
                home = self._segments[live.first_index]
                found[home] = max(found.get(home, 0), live.bytes)
        return found


def _nodes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op != "output"]


def _segments(forward: Sequence[fx.Node], backward: Sequence[fx.Node], segment_of: SegmentOf) -> list[str]:
    """The segment of every node; one without a name of its own belongs to its neighbour before it."""
    return [*_along(forward, segment_of), *_along(backward, segment_of)]


def _along(nodes: Sequence[fx.Node], segment_of: SegmentOf) -> Iterator[str]:
    named = [segment_of(str(node.meta["operator"])) if node.op == "call_function" else None for node in nodes]
    current = next((name for name in named if name is not None), "")
    for name in named:
        current = current if name is None else name
        yield current
