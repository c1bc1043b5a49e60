"""The runner of passes: one after the other, each timed.

A pass is a function `name(subject, ctx) -> subject`: of a graph in tidying and overlap, of a `LoweredStage` in the
lowering. `ctx` is whatever its list of passes needs, the same for all of them. Options are bound with
`functools.partial`. A pass may edit a graph in place and return it.
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
Subject = TypeVar("Subject")
Context = TypeVar("Context")
Pass: TypeAlias = Callable[[Subject, Context], Subject]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTiming:
    """What one pass took: CPU seconds, and the number of nodes before and after it."""

    name: str
    cpu_seconds: float
    nodes_before: int
    nodes_after: int


def run_pass(subject: Subject, one: Pass[Subject, Context], ctx: Context) -> tuple[Subject, float]:
    """(what the pass returns, CPU seconds)."""
    start = time.process_time()
    subject = one(subject, ctx)
    return subject, time.process_time() - start


def run_passes(
    graph_module: GraphModule, passes: Sequence[Pass[GraphModule, Context]], ctx: Context
) -> tuple[GraphModule, tuple[PassTiming, ...]]:
    """Run `passes` in order; the graph is linted and recompiled once, after the last."""
    timings = []
    for graph_pass in passes:
        before = len(graph_module.graph.nodes)
        graph_module, seconds = run_pass(graph_module, graph_pass, ctx)
        timing = PassTiming(
            name=pass_name(graph_pass),
            cpu_seconds=seconds,
            nodes_before=before,
            nodes_after=len(graph_module.graph.nodes),
        )
        log.debug("%s: %d -> %d nodes, %.3f CPU s", timing.name, before, timing.nodes_after, timing.cpu_seconds)
        timings.append(timing)
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module, tuple(timings)


def pass_name(graph_pass: Callable[..., object]) -> str:
    """The name of a pass, also when options are bound to it."""
    while isinstance(graph_pass, functools.partial):
        graph_pass = graph_pass.func
    return getattr(graph_pass, "__name__", type(graph_pass).__name__)
