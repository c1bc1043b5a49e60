"""Merge operators that compute the same (common subexpressions), within each phase.

    a = ne(x, -100); b = ne(x, -100); c = where(b, y, z)   -->   a = ne(x, -100); c = where(a, y, z)

Across phases nothing is merged: that would save for backward what backward computes from less.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import GraphModule, Node


def merge_equal(graph_module: GraphModule, ctx: object) -> GraphModule:
    """Replace each node by the first of its phase with the same operator and operands; random operators stay."""
    graph = graph_module.graph
    seen: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or _is_random(node):
            continue
        key = (node.target, node.meta["phase"], _frozen(node.args), _frozen(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    return graph_module


def _is_random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _frozen(value: Any) -> Hashable:
    """A hashable key that tells 1, 1.0 and True apart."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(value[key])) for key in sorted(value))
    if isinstance(value, slice):
        return ("slice", _frozen(value.start), _frozen(value.stop), _frozen(value.step))
    return (type(value), value)
