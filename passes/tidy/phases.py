"""Say of each node whether it belongs to the forward or to the backward pass.

    backward  depends on a tangent, or is used only by backward nodes (a getitem goes with what it takes from)
    forward   everything else: it is needed for the loss, an output or a mutation

Factories (no tensor operand: full, arange) that both phases use are duplicated, so that no constant is saved for
backward. The result stands in `node.meta["phase"]`.
"""

from __future__ import annotations

import operator
from typing import Literal, Protocol, TypeAlias

from torch.fx import Graph, GraphModule, Node

from autopar.passes.arguments import arguments

Phase: TypeAlias = Literal["forward", "backward"]


class PhaseContext(Protocol):
    """What the pass must know: which placeholders are tangents, which returned values the forward pass returns."""

    @property
    def tangents(self) -> frozenset[str]:
        """Names of the inputs from which backward starts."""

    @property
    def num_forward_outputs(self) -> int:
        """How many of the first outputs forward returns."""


def assign_phases(graph_module: GraphModule, ctx: PhaseContext) -> GraphModule:
    """Set `meta["phase"]` of every node but the output."""
    graph = graph_module.graph
    _mark_dependents(graph, ctx.tangents)
    _mark_needed_in_forward(graph, ctx.num_forward_outputs)
    _duplicate_shared_factories(graph)
    return graph_module


def _mark_dependents(graph: Graph, tangents: frozenset[str]) -> None:
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["phase"] = "backward" if node.name in tangents else "forward"
        elif node.op != "output":
            depends = any(operand.meta["phase"] == "backward" for operand in node.all_input_nodes)
            node.meta["phase"] = "backward" if depends else "forward"


def _mark_needed_in_forward(graph: Graph, num_forward_outputs: int) -> None:
    output = graph.output_node()
    needed = {node for node in arguments(output)[0][:num_forward_outputs] if isinstance(node, Node)}
    takers: list[Node] = []
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
        elif node.target is operator.getitem and node.meta["phase"] == "forward":
            takers.append(node)
        elif node.op in ("call_function", "get_attr"):
            node.meta["phase"] = "backward"
    for taker in takers:
        taker.meta["phase"] = taker.all_input_nodes[0].meta["phase"]


def _duplicate_shared_factories(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or node.all_input_nodes or node.meta["phase"] == "backward":
            continue
        users = [user for user in node.users if user.meta.get("phase") == "backward"]
        if not users:
            continue
        with graph.inserting_after(node):
            copy = graph.node_copy(node)
        copy.meta = {**node.meta, "phase": "backward"}
        for user in users:
            user.replace_input_with(node, copy)
