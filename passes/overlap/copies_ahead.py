"""Copies ahead: what comes from the host is asked for before it is read, and what goes there is awaited later.

    mm(x, w0); w1 = wait(from_host(h1)); mm(y, w1)     -->     from_host(h1); mm(x, w0); wait(h1); mm(y, w1)

At most `ahead_bytes` (of the device) are under way in one direction, or one copy where that is larger. Copies of one
direction begin in the order in which they are read, or made: they share a link, on which one ends before the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from autopar._compat import LazyGraphModule
from autopar.graphs.copy_nodes import COPY_FROM_HOST, COPY_TO_HOST, HOST_COPIES, WAIT_COPY
from autopar.graphs.forward_backward import Partition
from autopar.graphs.graph_copies import copied
from autopar.graphs.node_values import node_bytes


def copies_ahead(partition: Partition, ahead_bytes: float) -> Partition:
    """The graphs of a rank with starts of copies moved forward, and waits for copies backward."""
    forward, *backward = [moved_ahead(module, ahead_bytes) for module in partition.graphs]
    return replace(partition, forward=forward, backward=backward[0] if backward else None)


def moved_ahead(module: fx.GraphModule, ahead_bytes: float) -> fx.GraphModule:
    """One graph of a rank, likewise."""
    if not ahead_bytes or not any(node.target in HOST_COPIES for node in module.graph.nodes):
        return module
    graph = copied(module.graph)
    _ask_early(graph, ahead_bytes)
    _await_late(graph, ahead_bytes)
    return LazyGraphModule(module, graph)


def _ask_early(graph: fx.Graph, ahead_bytes: float) -> None:
    """Every copy from the host starts where what was asked for before it, and is not read yet, leaves room."""
    waits = [node for node in graph.nodes if node.target is WAIT_COPY and _started(node).target is COPY_FROM_HOST]
    under_way: deque[fx.Node] = deque()
    held, point = 0.0, _behind_inputs(graph)
    for wait in waits:
        start = _started(wait)
        size = node_bytes(start)
        while under_way and held + size > ahead_bytes:
            oldest = under_way.popleft()
            held -= node_bytes(oldest)
            point = max(point, oldest.next)
        earliest = max(point, *(operand.next for operand in start.all_input_nodes))
        if earliest < start:
            earliest.prepend(start)
        point = max(point, start.next)
        under_way.append(wait)
        held += size


def _await_late(graph: fx.Graph, ahead_bytes: float) -> None:
    """Every copy to the host is awaited where the next one needs the room, or at the end; what it copies lives till
    then."""
    starts = [node for node in graph.nodes if node.target is COPY_TO_HOST]
    under_way: deque[fx.Node] = deque()
    held, end = 0.0, graph.output_node()
    for start in starts:
        (wait,) = start.users
        size = node_bytes(start)
        while under_way and held + size > ahead_bytes:
            oldest = under_way.popleft()
            held -= node_bytes(oldest)
            start.prepend(oldest)
        under_way.append(wait)
        held += size
    for wait in under_way:
        end.prepend(wait)


def _started(wait: fx.Node) -> fx.Node:
    start = wait.args[0]
    assert isinstance(start, fx.Node)
    return start


def _behind_inputs(graph: fx.Graph) -> fx.Node:
    nodes: Iterable[fx.Node] = graph.nodes
    return next(node for node in nodes if node.op != "placeholder")
