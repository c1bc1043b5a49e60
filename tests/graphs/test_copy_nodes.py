"""Copies to the host in a graph: their waits, and whose memory they take."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.graphs.copy_nodes import COPY_FROM_HOST, COPY_TO_HOST, WAIT_COPY, copy_direction
from autopar.graphs.forward_backward import Partition, SavedTensor
from autopar.graphs.kernel_groups import launches_kernel
from autopar.graphs.live_ranges import LiveRange, host_memory_events, memory_events


def described(node: fx.Node, nbytes: int) -> fx.Node:
    node.meta |= {"local_shape": (nbytes,), "dtype": torch.uint8}
    return node


def call(graph: fx.Graph, name: str, target: Any, *arguments: Any, nbytes: int) -> fx.Node:
    return described(graph.call_function(target, arguments, name=name), nbytes)


def offloaded() -> Partition:
    """y = f(x) leaves while g(y) runs and comes back in backward."""
    graph = fx.Graph()
    x = described(graph.placeholder("x"), 1)
    y = call(graph, "y", torch.cat, (x,), nbytes=100)
    leaving = call(graph, "leaving", COPY_TO_HOST, y, nbytes=100)
    loss = call(graph, "loss", torch.cat, (y,), nbytes=4)
    parked = call(graph, "parked", WAIT_COPY, leaving, y, nbytes=100)
    after = call(graph, "after", torch.cat, (loss,), nbytes=2)
    graph.output((after, parked))
    back = fx.Graph()
    saved = described(back.placeholder("saved"), 100)
    coming = call(back, "coming", COPY_FROM_HOST, saved, torch.device("cpu"), nbytes=100)
    there = call(back, "there", WAIT_COPY, coming, saved, nbytes=100)
    back.output((call(back, "gradient", torch.cat, (there,), nbytes=8),))
    return Partition(
        forward=fx.GraphModule({}, graph),
        backward=fx.GraphModule({}, back),
        saved=(SavedTensor(name="parked", bytes=100, is_input=False),),
        parameters=frozenset(),
    )


def test_what_leaves_lives_on_the_device_until_its_wait_and_on_the_host_until_it_is_back() -> None:
    # x y leaving loss parked after | saved coming there gradient | the end
    assert memory_events(offloaded()) == [
        LiveRange("x", 1, 0, 1),
        LiveRange("y", 100, 1, 4),
        LiveRange("loss", 4, 3, 5),
        LiveRange("after", 2, 5, 10),
        LiveRange("coming", 100, 7, 9),
        LiveRange("gradient", 8, 9, 10),
    ]
    assert host_memory_events(offloaded()) == [LiveRange("leaving", 100, 2, 8)]


def test_starts_of_copies_say_where_they_go() -> None:
    partition = offloaded()
    assert partition.backward is not None
    nodes = {node.name: node for graph in (partition.forward, partition.backward) for node in graph.graph.nodes}
    assert [copy_direction(nodes[name]) for name in ("leaving", "coming", "loss")] == ["to_host", "from_host", None]


def test_neither_a_copy_nor_its_wait_is_a_kernel() -> None:
    partition = offloaded()
    graph = partition.forward.graph
    names = [node.name for node in graph.nodes if node.op == "call_function" and launches_kernel(node)]
    assert names == ["y", "loss", "after"]
