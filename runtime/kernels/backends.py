"""Kernels: how a graph is run. The plan says which backend, the same answer that the cost model priced.

A callable takes one list of arguments and empties it: `call([a, b])`. So the graph holds the only reference to what it
is given, and every argument ends with its last reader, as the planned memory assumes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import fx

from autopar._compat import Graph, LazyGraphModule
from autopar.errors import ConfigurationError
from autopar.graphs.graph_copies import copied
from autopar.runtime.collectives.host_graphs import use_host_collectives
from autopar.runtime.kernels.added_products import add_inside_products
from autopar.runtime.kernels.direct_calls import call_directly
from autopar.runtime.kernels.inductor import piece_by_piece
from autopar.runtime.kernels.named_calls import NamedGraph

GraphCall: TypeAlias = Callable[[list[Any]], Any]


def kernels(graph_module: fx.GraphModule, backend: str, *, folds: bool = False) -> GraphCall:
    """The graph as a callable: "eager" runs it node by node, "inductor" compiles what lies between collectives.

    folds: sums over ranks are those of logical shards.

    Raises ConfigurationError for a backend that does not exist.
    """
    if backend not in ("eager", "inductor"):
        raise ConfigurationError(f"kernel backend {backend!r} is unknown; the plan may say eager or inductor")
    graph = copied(graph_module.graph)
    use_host_collectives(graph, folds)
    own = LazyGraphModule(graph_module, graph)
    if backend == "inductor":
        return piece_by_piece(own, _node_by_node)
    add_inside_products(graph)
    return _node_by_node(own)


def _node_by_node(graph_module: fx.GraphModule) -> GraphCall:
    """graph_module: is written into."""
    call_directly(graph_module.graph)
    return NamedGraph(boxed(graph_module))


def boxed(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The graph with one placeholder, a list that it empties before it does anything else.

    def forward(self, x, w): return x @ w    -->    def forward(self, arguments): x = arguments.pop(0); w = ...
    """
    graph = Graph()
    arguments = graph.placeholder("arguments")
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        copies[node] = graph.call_method("pop", (arguments, 0))
        copies[node].meta = dict(node.meta)
    for node in graph_module.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return LazyGraphModule(graph_module, graph)
