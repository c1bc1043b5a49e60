"""What is added to a product is added inside of it: totals of gradients of weights, and biases.

    g = mm(dy', x); add_(total, g)         -->     addmm_(total, dy', x)
    y = add(reshape(mm(x, w)), bias)       -->     y = reshape(addmm(bias, x, w))

So micro-batches make no gradient beside the total, and what a product writes is read and written no second time
(`graphs/kernel_groups.py` prices both nodes as one kernel).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from autopar.graphs.kernel_groups import added_product, biased_product

_aten = torch.ops.aten


def add_inside_products(graph: fx.Graph) -> None:
    """Let products add to totals, and begin with biases, in place."""
    for node in list(graph.nodes):
        if (product := added_product(node)) is not None:
            _replace(node, _call(node, _aten.addmm_.default, (node.args[0], *product.args)))
        elif (found := biased_product(node)) is not None:
            added = _call(node, _aten.addmm.default, (found.bias, *found.product.args))
            if found.rows is not found.product:
                added = _call(node, found.rows.target, (added, found.rows.args[1]))
            _replace(node, added)


def _call(node: fx.Node, target: Any, args: tuple[Argument, ...]) -> fx.Node:
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args)
    made.meta = dict(node.meta)
    return made


def _replace(node: fx.Node, made: fx.Node) -> None:
    """Put `made` in the place of a node, and take out what only that node read."""
    node.replace_all_uses_with(made)
    unread = [node]
    while unread:
        one = unread.pop()
        if not one.users and one.op == "call_function":
            unread += one.all_input_nodes
            one.graph.erase_node(one)
