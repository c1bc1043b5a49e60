"""Micro-batches: the two graphs of one rank -> graphs that run once per part of the batch.

    forward(x, n) -> loss, count, saved           -->  statistics(x, n) -> count     forward(x, n) -> loss, saved
    backward(saved, tangent) -> g                 -->  backward(saved, tangent, total) adds g to `total` in place

Statistics (how many labels are not ignored) come first, for all parts; forward and backward of every part follow in
turn, with the statistics of the whole batch as inputs. A gradient is added where it is made, so that beside the sums of
all gradients one of them lives at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar._compat import Graph, LazyGraphModule
from autopar.graphs.forward_backward import Partition
from autopar.graphs.graph_copies import copied
from autopar.graphs.node_values import node_bytes
from autopar.ops.attention_operator import (
    attention_backward_by_index,
    attention_backward_with_mask_by_index,
    attention_by_index,
)
from autopar.ops.dropout_operator import dropout_by_index
from autopar.ops.random import exponential_by_index, integers_by_index, normal_by_index, uniform_by_index
from autopar.ops.ring_attention import attention_block, attention_block_backward
from autopar.passes.stages.late_sums import total_name
from autopar.program import MicroProgram, Program, returned_values

_aten = torch.ops.aten
DRAWING_FUNCTIONS = frozenset(
    {
        dropout_by_index,
        uniform_by_index,
        normal_by_index,
        exponential_by_index,
        integers_by_index,
        attention_by_index,
        attention_backward_by_index,
        attention_backward_with_mask_by_index,
        attention_block,
        attention_block_backward,
    }
)
"""Functions whose last arguments are the runs of global indices and the global shape."""


def without_statistics(program: Program, partition: Partition) -> tuple[Partition, fx.GraphModule | None]:
    """(the graphs of one part, whose forward takes the statistics of the batch and returns none; the graph that returns
    them, None where there are none). program: the lowered one of `partition`."""
    forward_outputs = [output for output in program.outputs if output.role != "gradient"]
    positions = [index for index, output in enumerate(forward_outputs) if output.role == "statistic"]
    if not positions:
        return partition, None
    returned = returned_values(partition.forward.graph)
    rest = [value for index, value in enumerate(returned) if index not in positions]
    statistics = _returning(partition.forward, [returned[index] for index in positions])
    return replace(partition, forward=_returning(partition.forward, rest)), statistics


def drawing_for(
    graph_module: fx.GraphModule, draws: Mapping[str, int], part: int, count: int, pieces: int
) -> fx.GraphModule:
    """A copy whose random operators draw the numbers that the samples of one part have in the whole batch.

    dropout_by_index(x, p, seed, salt, (((2, 2),),), (4,))    -->    dropout_by_index(..., (((6, 2),),), (8,))
    on the second of two parts, with two pieces of the batch: this rank holds samples 2 and 3 of the part

    draws: operator -> dim of the samples. pieces: how many pieces of the whole batch, one behind the other, every part
    takes its samples from.
    """
    copy = LazyGraphModule(graph_module, copied(graph_module.graph))
    for node in copy.graph.nodes:
        dim = draws.get(str(node.meta.get("operator"))) if node.target in DRAWING_FUNCTIONS else None
        if dim is None:
            continue
        *others, runs, shape = node.args
        moved = tuple(_moved(start, length, shape[dim], part, count, pieces) for start, length in runs[dim])
        runs = (*runs[:dim], sum(moved, ()), *runs[dim + 1 :])
        node.args = (*others, runs, (*shape[:dim], shape[dim] * count, *shape[dim + 1 :]))
    copy.recompile()
    return copy


def _moved(start: int, length: int, size: int, part: int, count: int, pieces: int) -> tuple[tuple[int, int], ...]:
    """The runs in the whole batch of one run of indices of a part, whose dim has `size`."""
    piece = size // pieces
    found = []
    while length > 0:
        index, offset = divmod(start, piece)
        taken = min(length, piece - offset)
        found.append(((index * count + part) * piece + offset, taken))
        start, length = start + taken, length - taken
    return tuple(found)


def joined_bytes(micro: MicroProgram, lowered: Program) -> float:
    """Local bytes of outputs that wait until all parts are done, beside those of the part that runs."""
    return float(
        sum(
            (micro.count - 1) * node_bytes(node)
            for node, output in zip(lowered.returned, lowered.outputs, strict=True)
            if output.role == "output" and isinstance(node, fx.Node) and micro.joined[output.name].dim is not None
        )
    )


def _returning(graph_module: fx.GraphModule, results: Sequence[Any]) -> fx.GraphModule:
    """A copy that returns `results` only; all placeholders stay."""
    graph = Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(graph_module.graph, copies)
    graph.output(tuple(copies[value] if isinstance(value, fx.Node) else value for value in results))
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return LazyGraphModule(graph_module, graph)


def adding_to_totals(graph_module: fx.GraphModule) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """A copy of backward that adds every gradient to a total, a placeholder behind all others, where it is made; and
    the index of the gradient of each among those that it returned. Totals state no shape: one lives all the time and is
    counted with the states of its parameter."""
    if not any(isinstance(value, fx.Node) for value in returned_values(graph_module.graph)):
        return graph_module, ()  # everything is frozen
    graph = Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(graph_module.graph, copies)
    gradients = [
        (index, copies[value])
        for index, value in enumerate(returned_values(graph_module.graph))
        if isinstance(value, fx.Node)
    ]
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    added = []
    for index, gradient in gradients:
        with graph.inserting_after(last):
            last = graph.placeholder(total_name(index))
        with graph.inserting_after(last if gradient.op == "placeholder" else gradient):
            added.append(graph.call_function(_aten.add_.Tensor, (last, gradient)))
        for node in (last, added[-1]):
            node.meta = {key: gradient.meta[key] for key in ("phase", "operator") if key in gradient.meta}
    graph.output(tuple(added))
    return LazyGraphModule(graph_module, graph), tuple(index for index, _ in gradients)
