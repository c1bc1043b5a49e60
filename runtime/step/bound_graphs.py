"""The graphs of a rank, bound to its processes.

groups.create(group_symbols(forward, backward))      every group that they name, in the same order on every rank
bind_groups(forward, groups)                          "dp_shard+tp" -> the name of a process group
"""

from __future__ import annotations

from torch import fx

from autopar._compat import LazyGraphModule
from autopar.graphs.graph_copies import copied
from autopar.runtime.process_groups import ProcessGroups


def group_symbols(*graph_modules: fx.GraphModule) -> set[str]:
    """The symbolic groups that the collectives of the graphs name."""
    return {symbol for module in graph_modules for node in module.graph.nodes if (symbol := _symbol(node))}


def _symbol(node: fx.Node) -> str | None:
    if node.op != "call_function" or getattr(node.target, "namespace", None) != "_c10d_functional":
        return None
    last = node.args[-1]
    return last if isinstance(last, str) else None


def bind_groups(graph_module: fx.GraphModule, groups: ProcessGroups) -> fx.GraphModule:
    """A copy of the graph whose collectives name real process groups.

    all_reduce(x, "sum", "dp_shard+tp")   -->   all_reduce(x, "sum", "7")
    """
    graph = copied(graph_module.graph)
    for node in graph.nodes:
        symbol = _symbol(node)
        if symbol is not None:
            node.args = (*node.args[:-1], groups.name(symbol))
    return LazyGraphModule(graph_module, graph)
