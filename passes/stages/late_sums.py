"""Late sums: a backward graph cut before the last sums of its gradients over ranks.

    g = all_reduce(x, "sum"); return g     -->     unreduced(...) -> x        and        reduce(x) -> g

Sums are linear, so what `unreduced` returns may be added up over many passes and reduced once. Gradients that end in
anything else than a sum over ranks are not cut. A gradient that changes its dtype behind the sum is not cut either:
it would be added up in the other one.

The last backward of a step holds the sums, so that they run beside it (in a pipeline that of the first stage, or the
last of the second halves of a stage, which send nothing):

    last(..., total): g = all_reduce(total + x, "sum"); return g
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._compat import Graph, LazyGraphModule
from autopar.program import returned_values

_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
_REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default


def total_name(index: int) -> str:
    """Of the placeholder for the total of a gradient, by its index among those of the program."""
    return f"total_{index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CutGraph:
    """`unreduced` returns the gradients at `positions` before their last sums, `reduce` takes those and completes
    them."""

    unreduced: fx.GraphModule
    reduce: fx.GraphModule
    positions: tuple[int, ...]


def cut_late_sums(graph_module: fx.GraphModule, first: int = 0, *, growing: bool = True) -> CutGraph | None:
    """Cut a backward graph before the last sums of its gradients from position `first` on; None where there are none.

    growing: also where gradients are larger before the sum (reduce_scatter).
    """
    gradients = returned_values(graph_module.graph)
    chains = {
        position: chain
        for position, node in enumerate(gradients)
        if position >= first and (chain := _reducing_chain(node, growing))
    }
    if not chains:
        return None
    return CutGraph(
        unreduced=_without(graph_module, chains), reduce=_only(graph_module, chains), positions=tuple(chains)
    )


def last_pass(module: fx.GraphModule, late: CutGraph, totals: Sequence[int]) -> fx.GraphModule:
    """A backward graph which adds to totals, with the sums of `late` behind them: it returns the complete gradients in
    the order of `totals`. Those that other passes added up are inputs behind the others. What it takes and returns of
    totals states its shape: a total ends where it is summed."""
    graph = Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(module.graph, copies)
    whole = returned_values(late.unreduced.graph)
    complete = {index: _added_up(graph, index, whole[index]) for index in totals}
    places = late.reduce.graph.find_nodes(op="placeholder")
    made = {place: complete[position] for place, position in zip(places, late.positions, strict=True)}
    for node in late.reduce.graph.nodes:
        if node.op == "call_function":
            made[node] = graph.node_copy(node, made.__getitem__)
    sums = returned_values(late.reduce.graph)
    complete |= {position: made[node] for position, node in zip(late.positions, sums, strict=True)}
    graph.output(tuple(complete.values()))
    return LazyGraphModule(module, graph)


def _added_up(graph: fx.Graph, index: int, whole: fx.Node) -> fx.Node:
    """The total of a gradient behind what this graph adds to it; a new input where it adds nothing."""
    inputs = graph.find_nodes(op="placeholder")
    total = next((node for node in inputs if node.target == total_name(index)), None)
    if total is None:
        with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before():
            total = graph.placeholder(total_name(index))
        total.meta = {key: whole.meta[key] for key in ("phase", "operator") if key in whole.meta}
    added = next(iter(total.users), total)
    for node in (total, added):
        node.meta = {**node.meta, **_form(whole)}
    return added


def _form(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("local_shape", "dtype") if key in node.meta}


def _reducing_chain(gradient: Any, growing: bool) -> list[fx.Node]:
    """The nodes from a sum over ranks to the returned gradient, each the only reader of the one before; else []."""
    chain: list[fx.Node] = []
    length = 0
    node = gradient
    while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
        is_sum = node.target in (_ALL_REDUCE, _REDUCE_SCATTER)
        if is_sum and (node.args[1] != "sum" or (node.target is _REDUCE_SCATTER and not growing)):
            break
        if len(node.all_input_nodes) != 1 or node.meta.get("dtype") != gradient.meta.get("dtype"):
            break
        if length and not is_sum and node.meta.get("redistributes") is None:
            break  # between two sums there is nothing but the way from one to the other
        chain.append(node)
        length = len(chain) if is_sum else length
        node = node.all_input_nodes[0]
    return chain[:length][::-1]


def _without(graph_module: fx.GraphModule, chains: Mapping[int, list[fx.Node]]) -> fx.GraphModule:
    graph = Graph()
    copies: dict[fx.Node, fx.Node] = {}
    gradients = graph.graph_copy(graph_module.graph, copies)
    assert isinstance(gradients, tuple | list)
    results = list(gradients)
    for position, chain in chains.items():
        results[position] = copies[chain[0].all_input_nodes[0]]
    graph.output(tuple(results))
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return LazyGraphModule(graph_module, graph)


def _only(graph_module: fx.GraphModule, chains: Mapping[int, list[fx.Node]]) -> fx.GraphModule:
    graph = Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for position, chain in chains.items():
        source = chain[0].all_input_nodes[0]
        copies[source] = graph.placeholder(f"unreduced_{position}")
        copies[source].meta = dict(source.meta)
    # collectives start on every rank in the order of the backward graph, not of the gradients
    place = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    for node in sorted((node for chain in chains.values() for node in chain), key=place.__getitem__):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[chain[-1]] for chain in chains.values()))
    return LazyGraphModule(graph_module, graph)
