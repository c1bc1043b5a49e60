"""A graph that leaves collectives open, and the one that waits for them, give together what the whole one gave."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.cost_models.program_timeline import LEFT_OPEN, wait_positions
from autopar.passes.overlap.left_open import left_open

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
ALL_REDUCE, WAIT = c10d.all_reduce.default, c10d.wait_tensor.default


def _targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def _returned(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.output_node().args[0]]  # type: ignore[union-attr]


def _module() -> fx.GraphModule:
    """The sum of g is returned; that of h is read once more."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    returned, read = (graph.call_function(WAIT, (graph.call_function(ALL_REDUCE, (x, "sum", "tp")),)) for _ in range(2))
    laid_out = graph.call_function(aten.reshape.default, (returned, [2, 2]))
    computed = graph.call_function(aten.neg.default, (read,))
    graph.output((computed, laid_out))
    return fx.GraphModule({}, graph)


def test_what_is_only_returned_is_awaited_by_the_other_graph() -> None:
    opened, ending = left_open(_module())
    assert _targets(ending) == [WAIT, aten.reshape.default]
    assert set(_returned(opened)) == {ALL_REDUCE, aten.neg.default}
    assert _returned(ending) == ["neg_default", aten.reshape.default], "the results in their order"
    assert _targets(opened).count(WAIT) == 1, "what is computed with waits where it stood"


def test_what_is_left_open_is_played_as_such() -> None:
    opened, ending = left_open(_module())
    nodes, waits = list(opened.graph.nodes), wait_positions(opened.graph.nodes)
    assert [nodes[start].target for start in waits] == [ALL_REDUCE] * 2
    assert sorted(waits.values())[-1] == LEFT_OPEN
    assert not wait_positions(ending.graph.nodes)
