"""Buffers have the kind of what they are kept for: gradients are what backward returns, and only that."""

from __future__ import annotations

import torch
from torch import fx

from autopar.explain.memory_pieces import GRADIENTS, INPUTS, SAVED, WORKING, pieces_at
from autopar.graphs.forward_backward import Partition
from autopar.graphs.live_ranges import LiveRange
from autopar.program import Program
from tests.planner.problems import captured_mlp


def lowered(program: Program) -> Partition:
    """Forward: x, weight, saved, loss. Backward: p, inner, gradient. Of any program; only names of inputs are read."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    saved = graph.call_function(torch.mm, (x, weight), name="saved")
    loss = graph.call_function(torch.sum, (saved,), name="loss")
    graph.output((loss, saved))
    back = fx.Graph()
    inner = back.call_function(torch.relu, (back.placeholder("p"),), name="inner")
    gradient = back.call_function(torch.neg, (inner,), name="gradient")
    back.output((gradient,))
    for node in back.nodes:
        node.meta["phase"] = "backward"
    return Partition(
        forward=fx.GraphModule({}, graph),
        backward=fx.GraphModule({}, back),
        saved=(),
        parameters=frozenset(entry.name for entry in program.inputs if entry.role == "parameter"),
    )


def test_what_backward_returns_are_gradients_and_what_it_reads_is_saved() -> None:
    program = captured_mlp()
    ranges = [  # 4 nodes of forward, 3 of backward; what is returned lives to 7, the end
        LiveRange("x", 1, 0, 7),
        LiveRange("saved", 2, 2, 5),
        LiveRange("inner", 4, 5, 6),
        LiveRange("gradient", 8, 6, 7),
    ]
    found = [list(pieces_at(program, lowered(program), ranges, index)) for index in range(8)]
    kinds = [{kind: size for _, kind, size in pieces} for pieces in found]
    assert kinds[3] == {INPUTS: 1.0, SAVED: 2.0}
    assert kinds[5] == {INPUTS: 1.0, SAVED: 2.0, WORKING: 4.0}
    assert kinds[6] == {INPUTS: 1.0, WORKING: 4.0, GRADIENTS: 8.0}
    assert kinds[7] == {INPUTS: 1.0, GRADIENTS: 8.0}
