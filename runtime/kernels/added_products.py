"""Gradients of weights that are products add to their totals inside of the product, where there are totals.

    g = mm(dy', x); add_(total, g)     -->     addmm_(total, dy', x)

So micro-batches make no gradient beside the total, and read and write the total once (`cost_models/kernel_groups.py`
prices both nodes as one kernel).
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.cost_models.kernel_groups import added_product

_aten = torch.ops.aten


def with_added_products(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy in which products add to totals."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    fused = {product for node in graph_module.graph.nodes if (product := added_product(node)) is not None}
    for node in graph_module.graph.nodes:
        product = added_product(node)
        if product is not None:
            total, *operands = (copies[one] for one in (node.args[0], *product.args) if isinstance(one, fx.Node))
            copies[node] = graph.call_function(_aten.addmm_.default, (total, *operands))
            copies[node].meta = dict(node.meta)
        elif node not in fused:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(graph_module, graph)
