"""Bytes over time, against brute force; ranges count the nodes of forward, then of backward."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx

from autopar.graphs.forward_backward import Partition, SavedTensor
from autopar.graphs.live_ranges import LiveRange, bytes_over_time, memory_events


@pytest.mark.parametrize("seed", range(20))
def test_bytes_over_time_are_those_of_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    ranges = []
    for i in range(draw.randint(1, 12)):
        first = draw.randint(0, 10)
        ranges.append(LiveRange(f"t{i}", draw.randint(0, 100), first, first + draw.randint(0, 6)))
    last = max(live.last_index for live in ranges)
    alive = [sum(r.bytes for r in ranges if r.first_index <= t <= r.last_index) for t in range(last + 1)]
    assert bytes_over_time(ranges).tolist() == alive


def test_nothing_alive_has_no_time() -> None:
    assert bytes_over_time([]).tolist() == []


def node_of(graph: fx.Graph, name: str, *operands: fx.Node, nbytes: int) -> fx.Node:
    """A node whose local value has so many bytes; without operands an input."""
    node = graph.call_function(torch.cat, (operands,), name=name) if operands else graph.placeholder(name)
    node.meta |= {"local_shape": (nbytes,), "dtype": torch.uint8}
    return node


def test_nodes_of_backward_are_counted_right_behind_those_of_forward_and_what_is_returned_lives_to_the_end() -> None:
    graph = fx.Graph()
    weight, x = node_of(graph, "weight", nbytes=100), node_of(graph, "x", nbytes=1)
    saved = node_of(graph, "saved", weight, x, nbytes=2)
    loss = node_of(graph, "loss", saved, nbytes=4)
    graph.output((loss, saved))
    back = fx.Graph()
    tangent = node_of(back, "tangent", nbytes=8)
    inner = node_of(back, "inner", tangent, nbytes=16)
    back.output((node_of(back, "gradient", inner, nbytes=32),))
    partition = Partition(
        forward=fx.GraphModule({}, graph),
        backward=fx.GraphModule({}, back),
        saved=(SavedTensor(name="saved", bytes=2, is_input=False),),
        parameters=frozenset({"weight"}),
    )
    # weight x saved loss | tangent (the saved value) inner gradient | the end
    assert memory_events(partition) == [
        LiveRange("x", 1, 1, 2),
        LiveRange("saved", 2, 2, 5),
        LiveRange("loss", 4, 3, 7),
        LiveRange("inner", 16, 5, 6),
        LiveRange("gradient", 32, 6, 7),
    ]
