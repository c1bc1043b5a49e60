"""Give every operator its stable name: `module.path/op#k`, with `/bwd` in the backward pass.

    mm of `layers.0.mlp.up`            layers.0.mlp.up/mm#0
    its weight gradient                layers.0.mlp.up/mm#0/bwd
    an operator outside any module     /sum#0

The module is the one whose forward ran the operator; backward operators carry that of their forward operator. `k`
counts per module, operator and phase, so a name neither depends on torch's node names nor on what other modules do.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch.fx import GraphModule, Node


def name_operators(graph_module: GraphModule, ctx: object) -> GraphModule:
    """Set `meta["operator"]` of every call_function node; `meta["phase"]` must be set."""
    counts: Counter[tuple[str, str, bool]] = Counter()
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        module, kind = module_path(node), operator_kind(node)
        backward = node.meta["phase"] == "backward"
        index = counts[module, kind, backward]
        counts[module, kind, backward] += 1
        node.meta["operator"] = f"{module}/{kind}#{index}" + ("/bwd" if backward else "")
    return graph_module


def operator_kind(node: Node) -> str:
    """`mm` for aten.mm.default, `getitem` for operator.getitem."""
    if node.target is operator.getitem:
        return "getitem"
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def module_path(node: Node) -> str:
    """Path of the module that ran the node (its forward node, in backward); "" for the model itself.

    Sums of gradients belong to no forward operator: they go with their last operand. Casts outside any module go with
    what they cast: a parameter, or its gradient.
    """
    while True:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        path = _innermost(stack.values()) if stack else ""
        if stack and (path or operator_kind(node) != "_to_copy"):
            return path
        if node.all_input_nodes and node.all_input_nodes[0].op == "placeholder":
            return str(node.all_input_nodes[0].meta["operator"]).rpartition(".")[0] if stack else ""
        operands = [operand for operand in node.all_input_nodes if operand.op == "call_function"]
        if not operands:
            return ""
        node = operands[-1]


def _innermost(entries: Iterable[Any]) -> str:
    path = str(list(entries)[-1][0])
    parts = [part.split("@")[0] for part in path.split(".")]  # `@1` marks the second call of a module
    return ".".join(parts[1:])  # the first part is the wrapper around model and loss
