"""Left open: a graph starts collectives that run on behind it, and another one waits for them.

    g = all_reduce(t); z = wait_tensor(g)                  g = all_reduce(t)
    return dx, z                                  -->      return dx, g             and       z = wait_tensor(g); return z

The last backward of a pipeline's stage sums gradients over ranks; what it sends to other stages does not wait for that.
"""

from __future__ import annotations

from torch import fx
from torch.fx import GraphModule

from autopar._compat import Graph, LazyGraphModule
from autopar.graphs.collective_nodes import describe
from autopar.program import returned_values


def left_open(module: GraphModule, first: int) -> tuple[GraphModule, GraphModule]:
    """(the graph, which returns its results up to position `first`, and then what the other graph takes; the graph that
    waits for collectives and returns the results from `first` on)."""
    returned = returned_values(module.graph)
    late = _only_at_the_end(module.graph, returned[:first])
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    read = {operand for node in late for operand in node.all_input_nodes} | set(returned[first:])
    handed = [node for node in nodes if node in read and node not in late]
    opened, made = Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        if node not in late:
            made[node] = opened.node_copy(node, made.__getitem__)
    opened.output(tuple(made[node] if isinstance(node, fx.Node) else node for node in (*returned[:first], *handed)))
    ending, taken = Graph(), dict[fx.Node, fx.Node]()
    for node in handed:
        taken[node] = ending.placeholder(node.name)
        taken[node].meta = dict(node.meta)
    for node in nodes:
        if node in late:
            taken[node] = ending.node_copy(node, taken.__getitem__)
    ending.output(tuple(taken[node] for node in returned[first:]))
    return LazyGraphModule(module, opened), LazyGraphModule(module, ending)


def _only_at_the_end(graph: fx.Graph, sent: list[object]) -> set[fx.Node]:
    """Waits, and what lays out what they bring, that nothing reads but each other and the results that are not sent."""
    nodes = list(graph.nodes)
    late, output, found = describe(nodes).late, nodes[-1], set[fx.Node]()
    for node in reversed(nodes):
        if node in late and node not in sent and all(user in found or user is output for user in node.users):
            found.add(node)
    return found
