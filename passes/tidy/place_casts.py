"""Move the casts of mixed precision to where they matter: autograd puts all of them at the ends of the graph.

    w16 = to(w); ...; y = mm(x, w16)      -->   ...; w16 = to(w); y = mm(x, w16)
    g16 = mm(a, b); ...; return to(g16)   -->   g16 = mm(a, b); g = to(g16); ...; return g

So a gathered cast lives from its first use, and a gradient is reduced, and its bf16 form freed, as soon as it exists.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node


def place_casts(graph_module: GraphModule, ctx: object) -> GraphModule:
    """Casts of placeholders go before their first reader, casts that are only returned go behind their operand."""
    positions = {node: position for position, node in enumerate(graph_module.graph.nodes)}
    for node in positions:
        if node.target is not torch.ops.aten._to_copy.default or not node.users:
            continue
        operand = node.all_input_nodes[0]
        if operand.op == "placeholder":
            min(node.users, key=positions.__getitem__).prepend(node)
        elif all(user.op == "output" for user in node.users):
            operand.append(node)
    return graph_module


def is_cast(node: Node) -> bool:
    """Whether a node changes the dtype of a floating tensor to another floating dtype, and nothing else."""
    if node.target is not torch.ops.aten._to_copy.default:
        return False
    before, after = node.all_input_nodes[0].meta["val"].dtype, node.meta["val"].dtype
    return bool(before != after and before.is_floating_point and after.is_floating_point)
