"""Micro-batches: the two graphs of one rank -> graphs that run once per part of the batch.

    forward(x, n) -> loss, count, saved           -->  statistics(x, n) -> count     forward(x, n) -> loss, saved
    backward(saved, tangent) -> g                 -->  backward(saved, tangent, total) adds g to `total` in place

Statistics (how many labels are not ignored) come first, for all parts; forward and backward of every part follow in
turn, with the statistics of the whole batch as inputs. A gradient is added where it is made, so that beside the sums of
all gradients one of them lives at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.passes.partition import Partition, node_bytes
from autopar.program import MicroProgram, Program

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroPartition:
    """The graphs of one part: `statistics` (None where there are none), and forward and backward as `partition`.

    totals: for each accumulating placeholder of backward, the index of its gradient among the program's gradients.
    They state no shape: a total lives all the time and is counted with the states of its parameter.
    """

    statistics: fx.GraphModule | None
    partition: Partition
    totals: tuple[int, ...]


def for_micro_batches(program: Program, partition: Partition) -> MicroPartition:
    """Split the statistics off, and let backward add to totals; `program` is the lowered one of `partition`."""
    forward_outputs = [output for output in program.outputs if output.role != "gradient"]
    positions = [index for index, output in enumerate(forward_outputs) if output.role == "statistic"]
    forward, statistics = partition.forward, None
    if positions:
        returned = _returned(forward.graph)
        statistics = _returning(forward, [returned[index] for index in positions])
        forward = _returning(forward, [value for index, value in enumerate(returned) if index not in positions])
    backward, totals = partition.backward, ()
    if backward is not None:
        backward, totals = _accumulating(backward)
    return MicroPartition(
        statistics=statistics, partition=replace(partition, forward=forward, backward=backward), totals=totals
    )


def joined_bytes(micro: MicroProgram, lowered: Program) -> float:
    """Local bytes of outputs that wait until all parts are done, beside those of the part that runs."""
    return float(
        sum(
            (micro.count - 1) * node_bytes(node)
            for node, output in zip(lowered.returned, lowered.outputs, strict=True)
            if output.role == "output" and isinstance(node, fx.Node) and micro.joined[output.name].dim is not None
        )
    )


def _returned(graph: fx.Graph) -> list[Any]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def _returning(graph_module: fx.GraphModule, results: Sequence[Any]) -> fx.GraphModule:
    """A copy that returns `results` only; all placeholders stay."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(graph_module.graph, copies)
    graph.output(tuple(copies[value] if isinstance(value, fx.Node) else value for value in results))
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return fx.GraphModule(graph_module, graph)


def _accumulating(graph_module: fx.GraphModule) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """A copy that adds every gradient to a total, a placeholder behind all others, where it is made."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(graph_module.graph, copies)
    gradients = [
        (index, copies[value])
        for index, value in enumerate(_returned(graph_module.graph))
        if isinstance(value, fx.Node)
    ]
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    added = []
    for index, gradient in gradients:
        with graph.inserting_after(last):
            last = graph.placeholder(f"total_{index}")
        with graph.inserting_after(last if gradient.op == "placeholder" else gradient):
            added.append(graph.call_function(_aten.add_.Tensor, (last, gradient)))
        for node in (last, added[-1]):
            node.meta = {key: gradient.meta[key] for key in ("phase", "operator") if key in gradient.meta}
    graph.output(tuple(added))
    return fx.GraphModule(graph_module, graph), tuple(index for index, _ in gradients)
