"""The graphs of a rank, bound to its processes and its device.

groups.create(group_symbols(forward, backward))      every group that they name, in the same order on every rank
bind_groups(forward, groups)                          "dp_shard+tp" -> the name of a process group; cpu -> cuda:1
"""

from __future__ import annotations

import torch
from torch import fx

from autopar._compat import LazyGraphModule
from autopar.graphs.collective_nodes import group_of
from autopar.graphs.graph_copies import copied
from autopar.runtime.process_groups import ProcessGroups


def group_symbols(*graph_modules: fx.GraphModule) -> set[str]:
    """The symbolic groups that the collectives of the graphs name."""
    return {symbol for module in graph_modules for node in module.graph.nodes if (symbol := group_of(node))}


def bind_groups(graph_module: fx.GraphModule, groups: ProcessGroups) -> fx.GraphModule:
    """A copy of the graph whose collectives name real process groups, and that makes its tensors on the device.

    all_reduce(x, "sum", "dp_shard+tp")   -->   all_reduce(x, "sum", "7")
    arange(8, device=cpu)                 -->   arange(8, device=cuda:1)       every model is captured on the CPU
    """
    graph = copied(graph_module.graph)
    for node in graph.nodes:
        if node.op == "call_function" and _names_device(node):
            node.kwargs = {**node.kwargs, "device": groups.device}
        symbol = group_of(node)
        if symbol is not None:
            node.args = (*node.args[:-1], groups.name(symbol))
    return LazyGraphModule(graph_module, graph)


def _names_device(node: fx.Node) -> bool:
    """Whether a node says on which device it makes its value, or makes one of nothing, on the default device."""
    if "device" in node.kwargs:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.all_input_nodes:
        return False
    return any(argument.name == "device" for argument in node.target._schema.arguments)
