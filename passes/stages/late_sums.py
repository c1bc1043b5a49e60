"""Late sums: a backward graph cut before the last sums of its gradients over ranks.

    g = all_reduce(x, "sum"); return g     -->     unreduced(...) -> x        and        reduce(x) -> g

Sums are linear, so what `unreduced` returns may be added up over many passes and reduced once. Gradients that end in
anything else than a sum over ranks are not cut. A gradient that changes its dtype behind the sum is not cut either:
it would be added up in the other one.

Where a rank runs all micro-batches one after the other, the last backward holds the sums, so that they run beside it:

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


def last_backward(backward: fx.GraphModule, late: CutGraph, totals: Sequence[int]) -> fx.GraphModule:
    """`backward`, which adds to totals, with the sums of `late` behind them: it returns the complete gradients, in the
    order of `totals`. What it takes and returns of them states its shape: a total ends where it is summed."""
    graph = Graph()
    copies: dict[fx.Node, fx.Node] = {}
    returned = graph.graph_copy(backward.graph, copies)
    assert isinstance(returned, tuple | list)
    whole = returned_values(late.unreduced.graph)
    complete = dict(zip(totals, returned, strict=True))
    for index, added in complete.items():
        for node in (added.args[0], added):
            node.meta = {**node.meta, **_form(whole[index])}
    places = late.reduce.graph.find_nodes(op="placeholder")
    made = {place: complete[position] for place, position in zip(places, late.positions, strict=True)}
    for node in late.reduce.graph.nodes:
        if node.op == "call_function":
            made[node] = graph.node_copy(node, made.__getitem__)
    sums = returned_values(late.reduce.graph)
    complete |= {position: made[node] for position, node in zip(late.positions, sums, strict=True)}
    graph.output(tuple(complete.values()))
    return LazyGraphModule(backward, graph)


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
