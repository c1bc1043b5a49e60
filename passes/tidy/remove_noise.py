"""Remove what tracing leaves behind and what computes nothing: aliases, detaches, asserts, dead code.

a = mm(x, y); b = alias(a); _assert_tensor_metadata(b); c = relu(b)   -->   a = mm(x, y); c = relu(a)
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from autopar.passes.arguments import arguments

aten = torch.ops.aten

ALIASES = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.detach_.default,
        aten.lift.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
    }
)
ASSERTS = frozenset(
    {
        aten._assert_tensor_metadata.default,
        aten._assert_async.default,
        aten._assert_async.msg,
        aten._assert_scalar.default,
        aten.sym_constrain_range_for_size.default,
    }
)


def remove_noise(graph_module: GraphModule, ctx: object) -> GraphModule:
    """Aliases are replaced by their source, asserts and unused nodes are removed."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in ALIASES:
            node.replace_all_uses_with(arguments(node)[0])
            graph.erase_node(node)
        elif node.target in ASSERTS:
            graph.erase_node(node)
    return remove_dead_code(graph_module, ctx)


def remove_dead_code(graph_module: GraphModule, ctx: object) -> GraphModule:
    """Nodes without users are removed; captured graphs are functional, so none has side effects."""
    graph_module.graph.eliminate_dead_code(is_impure_node=_is_impure)
    return graph_module


def _is_impure(node: Node) -> bool:
    return node.op in ("placeholder", "output")
