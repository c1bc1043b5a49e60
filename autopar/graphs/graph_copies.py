"""Copy of a graph, for passes that write into it and leave the original as it is."""

from __future__ import annotations

from torch import fx

from autopar._compat import Graph


def copied(graph: fx.Graph) -> fx.Graph:
    """The same nodes, in their order and with their names, outputs included."""
    result = Graph()
    result.output(result.graph_copy(graph, {}))
    return result
