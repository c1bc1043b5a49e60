"""Bytes of a lowered program, segment by segment: what a pipeline stage of any number of layers is composed of.

A program of embedding, one layer of each kind and head runs forward and backward once; every buffer has a live range
(`graphs/live_ranges.py`). A buffer that backward reads belongs to the segment in which it dies: the input of a layer
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

from autopar.graphs.forward_backward import Partition
from autopar.graphs.live_ranges import LiveRange, bytes_over_time, memory_events
from autopar.passes.lowering.step_halves import split_forward_backward
from autopar.program import Program
from benchmarks.validation.allocator import rounded_bytes
from benchmarks.validation.fused_kernels import made_again, unwritten

SegmentOf = Callable[[str], str]
"""Name of an operator or parameter -> the segment that it is in."""


SMALLEST_OFFLOADED_BYTES = 2 << 20
"""Megatron leaves tensors below 2^20 elements on the device (--min-offloaded-tensor-size)."""


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
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Parameter -> local elements."""
    saved_sizes: tuple[int, ...] = ()
    """Bytes of each buffer of `saved_bytes`."""


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
    in_place_gradients: bool = False,
    loss: LossBytes | None = None,
    leaves: Callable[[str], bool] | None = None,
) -> dict[str, SegmentMemory]:
    """Segment -> its bytes, in the order in which forward runs them.

    program: lowered for one rank, with one micro-batch. recompute: operators that backward runs again. fused: chains of
    pointwise operators are one kernel each (`fused_kernels.py`), else every operator writes its value.
    in_place_gradients: products of blocks add weight gradients to the buffer of the states themselves. loss: what the
    stack's cross entropy keeps, where its kernels are not those of the graph: all values as large as the logits then
    count by it. leaves: whether what this operator reads waits in host memory from the end of its segment's forward to
    the begin of its backward. Every buffer is rounded as the caching allocator does.
    """
    again = {*recompute, *(made_again(program.graph) if fused else ())}
    partition = split_forward_backward(program, again)
    timeline = _Timeline(partition, segment_of, fused=fused, in_place_gradients=in_place_gradients, leaves=leaves)
    logits = _logits(partition.forward.graph) if loss is not None else None
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
        saved_sizes=(*head.saved_sizes, saved),
        forward_extra_bytes=max(head.forward_extra_bytes, loss.forward * logits) - saved,
        backward_extra_bytes=max(head.backward_extra_bytes, loss.backward * logits - saved),
    )


def _logits(graph: fx.Graph) -> fx.Node | None:
    """The product whose result the loss reads: the last one of forward."""
    products = [node for node in graph.nodes if is_product(node)]
    return products[-1] if products else None


def is_product(node: fx.Node) -> bool:
    """Whether a node is a matrix product, of experts too."""
    return node.op == "call_function" and any(
        word in str(node.target) for word in ("aten.mm", "aten.bmm", "aten.addmm", "expert_")
    )


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

    def __init__(
        self,
        partition: Partition,
        segment_of: SegmentOf,
        *,
        fused: bool,
        in_place_gradients: bool,
        leaves: Callable[[str], bool] | None = None,
    ) -> None:
        forward = _nodes(partition.forward.graph)
        backward = _nodes(partition.backward.graph) if partition.backward is not None else []
        self._turn, self._nodes = len(forward), [*forward, *backward]
        self._segments = [*_along(forward, segment_of), *_along(backward, segment_of)]
        inside = {*unwritten(forward), *unwritten(backward)} if fused else set[str]()
        inputs = {node.name for node in forward if node.op == "placeholder"}
        self._whole = [
            self._buffer(live, in_place_gradients=in_place_gradients)
            for live in memory_events(partition)
            if live.name not in inputs and not (live.name in inside and not self._is_saved(live))
        ]
        self._ranges = [part for live in self._whole for part in self._on_device(live, leaves)]

    def _on_device(self, live: LiveRange, leaves: Callable[[str], bool] | None) -> Iterator[LiveRange]:
        """Where a buffer lies on the device: all its life, or but for the time between both passes of its segment."""
        reader = self._nodes[min(live.last_index, len(self._nodes) - 1)]
        is_small = live.bytes < SMALLEST_OFFLOADED_BYTES
        if leaves is None or is_small or not self._is_saved(live) or not leaves(str(reader.meta.get("operator"))):
            yield live
            return
        home = self._segments[live.last_index]
        indices = [index for index, name in enumerate(self._segments) if name == home]
        forward = [index for index in indices if index < self._turn]
        yield replace(live, last_index=max([live.first_index, *forward]))
        yield replace(live, first_index=min(index for index in indices if index >= self._turn))

    def _is_saved(self, live: LiveRange) -> bool:
        return live.first_index < self._turn <= live.last_index

    def _is_gradient(self, live: LiveRange) -> bool:
        """What backward returns lives to the end."""
        return live.first_index >= self._turn and live.last_index >= len(self._nodes)

    def _buffer(self, live: LiveRange, *, in_place_gradients: bool) -> LiveRange:
        """A buffer as the allocator counts it; a finished gradient leaves behind the node that made it."""
        if not self._is_gradient(live):
            return replace(live, bytes=rounded_bytes(live.bytes), last_index=min(live.last_index, len(self._nodes) - 1))
        is_added = in_place_gradients and self._is_product_of_a_block(live.first_index)
        return replace(live, bytes=0 if is_added else rounded_bytes(live.bytes), last_index=live.first_index)

    def _is_product_of_a_block(self, index: int) -> bool:
        return is_product(self._nodes[index]) and self._segments[index][-1].isdigit()

    def segments(self, logits: fx.Node | None) -> dict[str, SegmentMemory]:
        """What every segment holds; values as large as `logits` in its segment are left out."""
        left_out = self._as_large_as(logits) if logits is not None else frozenset[str]()
        ranges = [live for live in self._ranges if live.name not in left_out]
        turn = self._turn
        sizes: dict[str, list[int]] = {name: [] for name in self._segments}
        for live in ranges:
            if self._is_saved(live):
                sizes[self._segments[live.last_index]].append(live.bytes)
        saved = {name: sum(kept) for name, kept in sizes.items()}
        borders: dict[str, int] = dict.fromkeys(saved, 0)
        for live in self._whole:
            home = self._segments[live.last_index]
            if self._is_saved(live) and live.name not in left_out and self._segments[live.first_index] != home:
                borders[home] = max(borders[home], live.bytes)
        over_time = bytes_over_time(ranges)
        before = dict(zip(saved, np.cumsum(list(saved.values())).tolist(), strict=True))
        return {
            name: SegmentMemory(
                name=name,
                saved_bytes=saved[name],
                border_bytes=borders[name],
                saved_sizes=tuple(sizes[name]),
                forward_extra_bytes=self._extra(over_time[:turn], self._segments[:turn], name, before[name]),
                backward_extra_bytes=self._extra(over_time[turn:], self._segments[turn:], name, before[name]),
            )
            for name in saved
        }

    def _as_large_as(self, logits: fx.Node) -> frozenset[str]:
        """Values of the loss: whole logits, or several blocks of them."""
        home = self._segments[self._nodes.index(logits)]
        elements, columns = _elements(logits), int(logits.meta["local_shape"][-1])
        pairs = zip(self._nodes, self._segments, strict=True)
        return frozenset(node.name for node, segment in pairs if segment == home and _holds(node, elements, columns))

    def _extra(self, over_time: NDArray[np.int64], segments: Sequence[str], name: str, saved: int) -> int:
        inside = [held for held, home in zip(over_time.tolist(), segments, strict=False) if home == name]
        return max(0, max(inside, default=0) - saved)


def _nodes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op != "output"]


def _holds(node: fx.Node, elements: int, columns: int) -> bool:
    """Whether a node's value is made of blocks of `elements` with rows of `columns`."""
    shape = node.meta.get("local_shape")
    if not shape or not all(isinstance(size, int) for size in shape):
        return False
    return bool(shape[-1] % columns == 0 and _elements(node) % elements == 0)


def _along(nodes: Sequence[fx.Node], segment_of: SegmentOf) -> Iterator[str]:
    named = [segment_of(str(node.meta["operator"])) if node.op == "call_function" else None for node in nodes]
    current = next((name for name in named if name is not None), "")
    for name in named:
        current = current if name is None else name
        yield current
