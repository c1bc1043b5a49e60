"""Left open: a graph starts collectives that run on behind it, and another one waits for them.

    g = all_reduce(t); z = wait_tensor(g); return z
        -->   g = all_reduce(t); return g           and behind other passes           z = wait_tensor(g); return z

So the sums of a stage's gradients run beside the passes of other stages on the rank, and beside those of other ranks.
"""

from __future__ import annotations

from torch import fx
from torch.fx import GraphModule

from autopar._compat import Graph, LazyGraphModule
from autopar.graphs.collective_nodes import describe
from autopar.program import returned_values


def left_open(module: GraphModule) -> tuple[GraphModule, GraphModule]:
    """(the graph, which returns what the other one takes; the graph that waits for collectives and returns the
    results)."""
    results, late = returned_values(module.graph), _only_returned(module.graph)
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    read = {operand for node in late for operand in node.all_input_nodes} | set(results)
    handed = [node for node in nodes if node in read and node not in late]
    opened, made = Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        if node not in late:
            made[node] = opened.node_copy(node, made.__getitem__)
    opened.output(tuple(made[node] for node in handed))
    ending, taken = Graph(), dict[fx.Node, fx.Node]()
    for node in handed:
        taken[node] = ending.placeholder(node.name)
        taken[node].meta = dict(node.meta)
    for node in nodes:
        if node in late:
            taken[node] = ending.node_copy(node, taken.__getitem__)
    ending.output(tuple(taken[node] for node in results))
    return LazyGraphModule(module, opened), LazyGraphModule(module, ending)


def _only_returned(graph: fx.Graph) -> set[fx.Node]:
    """Waits, and what lays out what they bring, that nothing reads but each other and the output."""
    nodes = list(graph.nodes)
    late, output, found = describe(nodes).late, nodes[-1], set[fx.Node]()
    for node in reversed(nodes):
        if node in late and all(user in found or user is output for user in node.users):
            found.add(node)
    return found
