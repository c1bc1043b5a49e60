"""Backward of a stage in two halves: what other stages wait for (I), and the gradients of the weights (W).

    backward(saved, dy, total) -> dx; total += x' dy      -->      inputs(saved, dy) -> dx, kept      kept: x, dy
                                                                   weights(kept, total): total += x' dy

W is what leads to the gradient of one parameter and to nothing else; all the rest is I, whatever gradients of
parameters fall out of it on the way. On the first stage, where nothing is sent, the way down to the first layer is I
too: it leads to many parameters. Convolutions, which make both at once, are split (`split_convolutions`), but in the
whole; of another operator with several results each is taken in I, so that W holds the one that it reads and not all.
Gradients are added to totals where they are made, as in `micro_batches`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar._compat import Graph, LazyGraphModule
from autopar.graphs.node_values import is_getitem
from autopar.passes.stages.late_sums import total_name
from autopar.passes.tidy.split_convolutions import split_convolutions
from autopar.program import returned_values

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardGraphs:
    """`whole` takes (saved and tangents, totals) and returns the gradients that are sent; `inputs` takes saved values,
    tangents and `input_totals`, and returns them and then what is kept; `weights` takes that and `weight_totals`.
    Totals are named by their index among the gradients of the program."""

    whole: fx.GraphModule
    totals: tuple[int, ...]
    inputs: fx.GraphModule
    input_totals: tuple[int, ...]
    weights: fx.GraphModule
    weight_totals: tuple[int, ...]


def split_backward(backward: fx.GraphModule, sent: int) -> BackwardGraphs:
    """Split the lowered backward graph of a stage; its first `sent` gradients go to other stages."""
    whole, backward = backward, split_convolutions(backward)
    returned = returned_values(backward.graph)
    late = _leading_to_one_weight(backward.graph, returned, sent)
    weights = [index for index in range(sent, len(returned)) if isinstance(returned[index], fx.Node)]
    first = tuple(index for index in weights if returned[index] not in late)
    second = tuple(index for index in weights if returned[index] in late)
    kept = [node for node in backward.graph.nodes if node not in late and any(user in late for user in node.users)]
    return BackwardGraphs(
        whole=_copy(whole, None, returned_values(whole.graph), sent, tuple(weights), []),
        totals=tuple(weights),
        inputs=_copy(backward, late, returned, sent, first, kept),
        input_totals=first,
        weights=_weights(backward, late, returned, second, kept),
        weight_totals=second,
    )


def _leading_to_one_weight(graph: fx.Graph, returned: Sequence[Any], sent: int) -> set[fx.Node]:
    """Calls that lead to one gradient, and that of a parameter."""
    leads: dict[fx.Node, int] = {}
    for index, node in enumerate(returned):
        if isinstance(node, fx.Node):
            leads[node] = leads.get(node, 0) | (1 << index)
    for node in reversed(graph.nodes):
        for operand in node.all_input_nodes if node.op == "call_function" else []:
            leads[operand] = leads.get(operand, 0) | leads.get(node, 0)
    late = set[fx.Node]()
    for node in graph.nodes:
        leads_to_one = (mask := leads.get(node, 0)).bit_count() == 1 and mask >> sent
        if node.op == "call_function" and leads_to_one and (not is_getitem(node) or node.args[0] in late):
            late.add(node)
    return late


def _copy(
    backward: fx.GraphModule,
    without: Collection[fx.Node] | None,
    returned: Sequence[Any],
    sent: int,
    totals: Sequence[int],
    kept: Sequence[fx.Node],
) -> fx.GraphModule:
    """Backward without some calls: returns what is sent and what is kept, and adds the rest to totals."""
    graph = Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in backward.graph.nodes:
        if node.op == "placeholder" or (node.op == "call_function" and node not in (without or ())):
            made[node] = graph.node_copy(node, made.__getitem__)
    _add_to_totals(graph, [(index, made[returned[index]]) for index in totals])
    results = [made[node] if isinstance(node, fx.Node) else node for node in returned[:sent]]
    graph.output((*results, *(made[node] for node in kept)))
    return LazyGraphModule(backward, graph)


def _weights(
    backward: fx.GraphModule,
    late: Collection[fx.Node],
    returned: Sequence[Any],
    totals: Sequence[int],
    kept: Sequence[fx.Node],
) -> fx.GraphModule:
    graph = Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in kept:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in backward.graph.nodes:
        if node in late:
            made[node] = graph.node_copy(node, made.__getitem__)
    _add_to_totals(graph, [(index, made[returned[index]]) for index in totals])
    graph.output(())
    return LazyGraphModule(backward, graph)


def _add_to_totals(graph: fx.Graph, gradients: Sequence[tuple[int, fx.Node]]) -> None:
    """Add every gradient to a total, a placeholder behind all others, where it is made."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    last = placeholders[-1] if placeholders else None
    for index, gradient in gradients:
        with graph.inserting_after(last) if last else graph.inserting_before():
            last = graph.placeholder(total_name(index))
        with graph.inserting_after(last if gradient.op == "placeholder" else gradient):
            added = graph.call_function(_aten.add_.Tensor, (last, gradient))
        for node in (last, added):
            node.meta = {key: gradient.meta[key] for key in ("phase", "operator") if key in gradient.meta}
