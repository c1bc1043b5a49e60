"""What a collective waits for and what makes its operand is each counted once, however many ways lead there."""

from __future__ import annotations

import torch
from torch import fx

from autopar.graphs.collective_nodes import ALL_GATHER, ALL_REDUCE, WAIT, describe
from autopar.ops.buckets import packed

aten = torch.ops.aten


def test_a_maker_that_is_reached_by_two_ways_is_named_once_and_a_parameter_is_none() -> None:
    graph = fx.Graph()
    weight = graph.placeholder("weight")
    waited = graph.call_function(WAIT, (graph.call_function(ALL_REDUCE, (weight, "sum", "dp")),))
    made = graph.call_function(aten.mm.default, (weight, weight))
    views = [graph.call_function(aten.view.default, (node, [-1])) for node in (made, made, waited, waited, weight)]
    start = graph.call_function(ALL_REDUCE, (graph.call_function(packed, (views,)), "sum", "dp"))
    graph.output((graph.call_function(WAIT, (start,)),))
    found = describe(list(graph.nodes)[:-1])
    assert found.makers[start] == (made,)
    assert found.waits_into[start] == (waited,)


def test_a_gather_of_a_parameter_is_early_and_one_of_what_is_computed_is_not() -> None:
    graph = fx.Graph()
    weight = graph.placeholder("weight")
    early = graph.call_function(ALL_GATHER, (graph.call_function(aten.view.default, (weight, [-1])), 2, "dp"))
    late = graph.call_function(ALL_GATHER, (graph.call_function(aten.relu.default, (weight,)), 2, "dp"))
    graph.output((early, late))
    found = describe(list(graph.nodes)[:-1])
    assert [found.is_early_gather(start) for start in (early, late)] == [True, False]
