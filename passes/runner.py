"""The runner of passes: graph -> graph, one after the other, each timed.

A pass is a function `name(graph_module, ctx) -> graph_module`; `ctx` is whatever its list of passes needs, the same
for all of them. Options are bound with `functools.partial`. A pass may edit the graph in place and return it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from torch.fx import GraphModule

log = logging.getLogger(__name__)
Context = TypeVar("Context")
Pass: TypeAlias = Callable[[GraphModule, Context], GraphModule]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTiming:
    """What one pass took: CPU seconds, and the number of nodes before and after it."""

    name: str
    cpu_seconds: float
    nodes_before: int
    nodes_after: int


def run_passes(
    graph_module: GraphModule, passes: Sequence[Pass[Context]], ctx: Context
) -> tuple[GraphModule, tuple[PassTiming, ...]]:
    """Run `passes` in order; the graph is linted and recompiled once, after the last."""
    timings = []
    for graph_pass in passes:
        before, start = len(graph_module.graph.nodes), time.process_time()
        graph_module = graph_pass(graph_module, ctx)
        timing = PassTiming(
            name=pass_name(graph_pass),
            cpu_seconds=time.process_time() - start,
            nodes_before=before,
            nodes_after=len(graph_module.graph.nodes),
        )
        log.debug("%s: %d -> %d nodes, %.3f CPU s", timing.name, before, timing.nodes_after, timing.cpu_seconds)
        timings.append(timing)
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module, tuple(timings)


def pass_name(graph_pass: Callable[..., GraphModule]) -> str:
    """The name of a pass, also when options are bound to it."""
    while isinstance(graph_pass, functools.partial):
        graph_pass = graph_pass.func
    return getattr(graph_pass, "__name__", type(graph_pass).__name__)
