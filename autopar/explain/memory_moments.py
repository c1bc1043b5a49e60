"""Memory: where the bytes of the fullest moment of a step are, by kind, by module and over time.

    parameters                      1.2 GiB     stored blocks
    optimizer state                 2.4 GiB     with the totals of gradients where a step has micro-batches
    gradients                       0.6 GiB     finished ones
    activations saved for backward  8.1 GiB     made in forward, read in backward
    gathered parameters             0.4 GiB     whole, while they are read
    moved by collectives            0.2 GiB     copies in other layouts, buckets
    working values                  1.1 GiB     everything else that lives just then

Counted on the program of the rank that runs (`priced_stages.py`), buffer by buffer (`graphs/live_ranges.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from torch import fx

from autopar.cost_models.optimizer_step import step_buffer_bytes
from autopar.explain.answers import MemoryTable
from autopar.explain.asked_step import asked_step
from autopar.explain.memory_pieces import (
    JOINED,
    LOSS,
    OPTIMIZER,
    OUTSIDE,
    PARAMETERS,
    UPDATE,
    loss_operators,
    module_of,
    moment_of,
    owner_of,
    pieces_at,
    sums,
)
from autopar.explain.recovered import query_of
from autopar.explain.source import Source
from autopar.explain.stage_memory import AT_OPTIMIZER, stage_memory_table
from autopar.graphs.live_ranges import bytes_over_time, memory_events
from autopar.passes.lowering.micro_batch_graphs import joined_bytes
from autopar.planner.one_mesh.query import Query
from autopar.plans.parallel_plan import Plan
from autopar.program import Program


def memory_table(source: Source, plan: Plan, rank: int | None) -> MemoryTable:
    """The table of one rank; None: of the first one, or of the tightest rank group where there are stages. Raises
    ConfigurationError for a rank that the plan does not have."""
    if plan.in_stages:
        return stage_memory_table(source, plan, rank)
    rank = rank or 0
    graphs, query = asked_step(source, plan).graphs(rank), query_of(source, plan)
    lowered, partition = graphs.of[0].lowered.program, graphs.of[0].lowered.partition
    states = list(_states(lowered, query, joined_bytes(graphs.micro, lowered)))
    ranges = memory_events(partition)
    held = bytes_over_time(ranges)
    constant = math.fsum(size for _, _, size in states)
    update = [("", UPDATE, float(_step_buffers(lowered, query)))]
    at_end = constant + update[0][2] + (float(held[-1]) if len(held) else 0.0)
    fullest = int(np.argmax(held)) if len(held) else 0
    is_end = not len(held) or at_end >= constant + float(held[fullest])
    index = len(held) - 1 if is_end else fullest
    pieces = [*states, *(update if is_end else []), *pieces_at(lowered, partition, ranges, index)]
    nodes = [node for graph in partition.graphs for node in graph.graph.nodes if node.op != "output"]
    loss = loss_operators(nodes)
    moment = AT_OPTIMIZER if is_end else moment_of(nodes, min(fullest, len(nodes) - 1), loss)
    return MemoryTable(
        rank=rank,
        moment=moment,
        peak_bytes=math.fsum(size for _, _, size in pieces),
        limit_bytes=query.budget_bytes,
        by_kind=sums((kind, size) for _, kind, size in pieces),
        by_module=sums((module_of(name, loss), size) for name, _, size in pieces),
        over_time=(*_over_time(plan, nodes, loss, (held + constant).tolist()), (AT_OPTIMIZER, at_end)),
    )


def _states(lowered: Program, query: Query, joined: float) -> Iterator[tuple[str, str, float]]:
    """(name, kind, bytes) of what lives throughout."""
    for entry in lowered.inputs:
        if entry.role == "parameter":
            elements = math.prod(entry.shape)
            yield entry.name, PARAMETERS, float(elements * entry.dtype.itemsize)
            yield entry.name, OPTIMIZER, float(elements * query.state_bytes[entry.name].optimizer)
    if joined:
        yield "", JOINED, joined


def _step_buffers(lowered: Program, query: Query) -> float:
    """Of copies that the optimizer's step makes for a while."""
    updated = [
        (float(math.prod(entry.shape) * entry.dtype.itemsize), query.state_bytes[entry.name].step_buffers)
        for entry in lowered.inputs
        if entry.role == "parameter"
    ]
    return step_buffer_bytes(updated, query.cluster.device.kind)


def _over_time(
    plan: Plan, nodes: Sequence[fx.Node], loss: Collection[str], held: Sequence[float]
) -> Iterator[tuple[str, float]]:
    """The fullest operator of every block, in the order in which blocks run."""
    named = [
        (str(node.meta["phase"]), _block(owner_of(node), loss), float(size))
        for node, size in zip(nodes, held, strict=False)
        if node.op == "call_function" and owner_of(node) in plan.operators and "redistributes" not in node.meta
    ]
    for (phase, block), run in itertools.groupby(named, key=lambda entry: entry[:2]):
        yield f"{phase} {block}", max(size for _, _, size in run)


def _block(operator: str, loss: Collection[str]) -> str:
    """The module of an operator up to its first number: "model.layers.3"; else up to the second name."""
    if operator in loss:
        return LOSS
    path = operator.partition("/")[0].split(".")
    end = next((index + 1 for index, part in enumerate(path) if part.isdigit()), 2)
    return ".".join(path[:end]) or OUTSIDE
