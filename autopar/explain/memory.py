"""Memory: where the bytes of the fullest moment of a step are, by kind, by module and over time.

    parameters                      1.2 GiB     stored blocks
    optimizer state                 2.4 GiB     with the totals of gradients where a step has micro-batches
    gradients                       0.6 GiB     finished ones
    activations saved for backward  8.1 GiB     made in forward, read in backward
    gathered parameters             0.4 GiB     whole, while they are read
    moved by collectives            0.2 GiB     copies in other layouts, buckets
    working values                  1.1 GiB     everything else that lives just then

Counted on the program of the rank that runs (`rank_graphs.py`), buffer by buffer (`passes/live_ranges.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from torch import fx

from autopar.cost_models.memory import LiveRange, bytes_over_time
from autopar.cost_models.optimizer_step import step_buffer_bytes
from autopar.explain.rank_graphs import RankGraphs, rank_graphs
from autopar.explain.source import Source
from autopar.parallel_plan import Plan
from autopar.passes.live_ranges import memory_events
from autopar.plan_answers import MemoryTable
from autopar.plan_text import without_numbers
from autopar.program import returned_values

PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer state", "gradients"
SAVED, GATHERED, MOVED, WORKING = (
    "activations saved for backward", "gathered parameters", "moved by collectives", "working values"
)  # fmt: skip
INPUTS, JOINED, UPDATE = "inputs", "joined outputs", "buffers of the optimizer's step"
AT_OPTIMIZER = "the optimizer's step"
OUTSIDE = "(outside of modules)"


def memory_table(source: Source, plan: Plan, rank: int) -> MemoryTable:
    """The table of one rank. Raises ConfigurationError for stages and for a rank that the plan does not have."""
    graphs = rank_graphs(source, plan, rank)
    states = list(_states(graphs))
    ranges = memory_events(graphs.partition)
    held = bytes_over_time(ranges)
    constant = math.fsum(size for _, _, size in states)
    update = [("", UPDATE, float(_step_buffers(graphs)))]
    at_end = constant + update[0][2] + (float(held[-1]) if len(held) else 0.0)
    fullest = int(np.argmax(held)) if len(held) else 0
    is_end = not len(held) or at_end >= constant + float(held[fullest])
    index = len(held) - 1 if is_end else fullest
    pieces = [*states, *(update if is_end else []), *_pieces(graphs, ranges, index)]
    nodes = graphs.nodes
    moment = AT_OPTIMIZER if is_end else _moment(nodes, min(fullest, len(nodes) - 1))
    return MemoryTable(
        rank=rank,
        moment=moment,
        peak_bytes=math.fsum(size for _, _, size in pieces),
        limit_bytes=graphs.query.budget_bytes,
        by_kind=_sums((kind, size) for _, kind, size in pieces),
        by_module=_sums((_module(name), size) for name, _, size in pieces),
        over_time=(*_over_time(plan, nodes, (held + constant).tolist()), (AT_OPTIMIZER, at_end)),
    )


def _states(graphs: RankGraphs) -> Iterator[tuple[str, str, float]]:
    """(name, kind, bytes) of what lives throughout."""
    for entry in graphs.lowered.inputs:
        if entry.role == "parameter":
            elements = math.prod(entry.shape)
            yield entry.name, PARAMETERS, float(elements * entry.dtype.itemsize)
            yield entry.name, OPTIMIZER, float(elements * graphs.query.state_bytes[entry.name].optimizer)
    if graphs.joined_bytes:
        yield "", JOINED, graphs.joined_bytes


def _step_buffers(graphs: RankGraphs) -> float:
    """Of copies that the optimizer's step makes for a while."""
    updated = [
        (float(math.prod(entry.shape) * entry.dtype.itemsize), graphs.query.state_bytes[entry.name].step_buffers)
        for entry in graphs.lowered.inputs
        if entry.role == "parameter"
    ]
    return step_buffer_bytes(updated, graphs.query.cluster.device.kind)


def _pieces(graphs: RankGraphs, ranges: Sequence[LiveRange], index: int) -> Iterator[tuple[str, str, float]]:
    """(name, kind, bytes) of the buffers that live at an index."""
    forward = [node for node in graphs.partition.forward.graph.nodes if node.op != "output"]
    backward = graphs.partition.backward
    by_name = [
        {node.name: node for node in forward},
        {} if backward is None else {node.name: node for node in backward.graph.nodes},
    ]
    gradients = set() if backward is None else {n for n in returned_values(backward.graph) if isinstance(n, fx.Node)}
    inputs = {entry.name: entry.role for entry in graphs.lowered.inputs}
    parameters = {name for name, role in inputs.items() if role == "parameter"}
    for live in ranges:
        if live.first_index <= index <= live.last_index:
            in_backward = live.first_index >= len(forward)
            node = by_name[in_backward].get(live.name) or by_name[not in_backward][live.name]
            crosses = not in_backward and live.last_index >= len(forward)
            kind = _kind(node, crosses, live.last_index >= len(graphs.nodes), gradients, parameters)
            yield _owner(node), kind, float(live.bytes)


def _kind(node: fx.Node, crosses: bool, is_returned: bool, gradients: set[fx.Node], parameters: set[str]) -> str:
    copy = node.meta.get("redistributes")
    if node.op == "placeholder" or node.op == "get_attr":
        return INPUTS
    if is_returned and (node in gradients or node.meta.get("phase") == "backward"):
        return GRADIENTS
    if _owner(node) in parameters:
        return GATHERED
    if crosses:
        return SAVED
    return MOVED if copy is not None or getattr(node.target, "namespace", "") == "_c10d_functional" else WORKING


def _owner(node: fx.Node) -> str:
    return str(node.meta.get("operator", node.name if node.op == "placeholder" else ""))


def _module(name: str) -> str:
    """The module of a parameter or operator, with repeated layers as one."""
    path = name.partition("/")[0] if "/" in name else name.rpartition(".")[0]
    return without_numbers(path) or OUTSIDE


def _moment(nodes: Sequence[fx.Node], index: int) -> str:
    node = nodes[index]
    phase = "backward" if node.meta.get("phase") == "backward" else "forward"
    return f"{phase} {_owner(node)}"


def _over_time(plan: Plan, nodes: Sequence[fx.Node], held: Sequence[float]) -> Iterator[tuple[str, float]]:
    """The fullest operator of every block, in the order in which blocks run."""
    named = [
        (str(node.meta["phase"]), _block(_owner(node)), float(size))
        for node, size in zip(nodes, held, strict=False)
        if node.op == "call_function" and _owner(node) in plan.operators and "redistributes" not in node.meta
    ]
    for (phase, block), run in itertools.groupby(named, key=lambda entry: entry[:2]):
        yield f"{phase} {block}", max(size for _, _, size in run)


def _block(operator: str) -> str:
    """The module of an operator up to its first number: "model.layers.3"; else up to the second name."""
    path = operator.partition("/")[0].split(".")
    end = next((index + 1 for index, part in enumerate(path) if part.isdigit()), 2)
    return ".".join(path[:end]) or OUTSIDE


def _sums(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Largest first."""
    found: dict[str, list[float]] = {}
    for key, size in pairs:
        found.setdefault(key, []).append(size)
    totals = {key: math.fsum(sizes) for key, sizes in found.items()}
    return {key: size for key, size in sorted(totals.items(), key=lambda item: -item[1]) if size}
