"""Split convolution_backward, so that the gradient of its weight can come later than that of its input.

    dx, dw, db = convolution_backward(dy, x, w, ..., [True, True, True])
                                -->
    dx = convolution_backward(dy, x, w, ..., [True, False, False])[0]
    dw = convolution_backward(dy, x, w, ..., [False, True, False])[1]; db = ...

Where all run at once the operator stays whole: its kernels share what they load.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar._compat import Graph, LazyGraphModule

_BACKWARD = torch.ops.aten.convolution_backward.default
_MASK = 10
"""Position of the argument that says which of the gradients of input, weight and bias are wanted."""


def split_convolutions(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a backward graph in which every gradient of a convolution has a call of its own."""
    graph = Graph()
    made: dict[fx.Node, fx.Node] = {}
    alone: dict[fx.Node, list[fx.Node]] = {}
    for node in graph_module.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], made.__getitem__))
            continue
        made[node] = graph.node_copy(node, made.__getitem__)
        if node.target is _BACKWARD and sum(node.args[_MASK]) > 1:
            alone[node] = _one_each(graph, made[node])
        elif node.target is operator.getitem and node.args[0] in alone:
            made[node].args = (alone[node.args[0]][node.args[1]], node.args[1])
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return LazyGraphModule(graph_module, graph)


def _one_each(graph: fx.Graph, whole: fx.Node) -> list[fx.Node]:
    """Calls that make the gradient of the input, of the weight and of the bias; the first is `whole` itself."""
    calls = [whole, *(graph.node_copy(whole, lambda operand: operand) for _ in range(2))]
    for index, call in enumerate(calls):
        _ask_for(call, [index == wanted for wanted in range(3)])
    return calls


def _ask_for(node: fx.Node, mask: list[bool]) -> None:
    node.args = (*node.args[:_MASK], mask)
    for key in ("local_shape", "dtype"):
        described: Any = node.meta.get(key)
        if isinstance(described, tuple):
            kept = tuple(part if wanted else None for part, wanted in zip(described, mask, strict=True))
            node.meta = {**node.meta, key: kept}
