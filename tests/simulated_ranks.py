"""Run one FX graph per rank in one process: every graph advances to its next collective, then the group meets.

    a0 = all_reduce(x0, "sum", "tp")   }  both wait, x0 + x1 is handed to both, both go on
    a1 = all_reduce(x1, "sum", "tp")   }

Groups are symbolic: axis names joined by "+", in mesh order ("dp_shard+tp"). Ranks that meet with different
collectives, shapes or in different order are an AssertionError that names the nodes: real processes would hang or
corrupt their data.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.graphs.collective_nodes import group_of
from autopar.layouts.placement import Mesh
from autopar.ops.symmetric_products import gathered_products, product_scattered

_c10d = torch.ops._c10d_functional

Runnable = fx.GraphModule | fx.Graph
"""A graph is enough where it reads no attributes; a module of it would be written as Python and compiled."""


@dataclass(frozen=True)
class Meeting:
    """A rank that waits in a collective: what it brought."""

    node: fx.Node
    tensor: Any
    arguments: tuple[Any, ...]
    group: str


def run_ranks(graphs: Sequence[Runnable], inputs: list[list[Tensor]], mesh: Mesh) -> list[tuple[Any, ...]]:
    """Outputs of every rank, in rank order. `inputs[rank]` are the values of the placeholders of `graphs[rank]`."""
    assert len(graphs) == len(inputs) == mesh.size
    programs = [_advance(graph, values) for graph, values in zip(graphs, inputs, strict=True)]
    outputs: dict[int, tuple[Any, ...]] = {}
    waiting: dict[int, Meeting] = {}
    _resume(programs, dict.fromkeys(range(mesh.size)), waiting, outputs)
    while waiting:
        answers = dict(_meet(waiting, mesh))
        assert answers, f"no group is complete: {[(rank, m.node.name, m.group) for rank, m in waiting.items()]}"
        for rank in answers:
            del waiting[rank]
        _resume(programs, answers, waiting, outputs)
    return [outputs[rank] for rank in range(mesh.size)]


def _resume(
    programs: list[Generator[Meeting, Any, tuple[Any, ...]]],
    answers: dict[int, Any],
    waiting: dict[int, Meeting],
    outputs: dict[int, tuple[Any, ...]],
) -> None:
    for rank, answer in answers.items():
        try:
            waiting[rank] = programs[rank].send(answer)
        except StopIteration as stop:
            outputs[rank] = stop.value


def _advance(runnable: Runnable, values: list[Tensor]) -> Generator[Meeting, Any, tuple[Any, ...]]:
    """Interpret one graph; yields in front of every collective and takes its result."""
    module, graph = (runnable, runnable.graph) if isinstance(runnable, fx.GraphModule) else (nn.Module(), runnable)
    interpreter = fx.Interpreter(module, garbage_collect_values=False, graph=graph)
    interpreter.args_iter = iter(values)
    for node in graph.nodes:
        if node.op == "output":
            result = interpreter.run_node(node)
            return tuple(result) if isinstance(result, tuple | list) else (result,)
        if _is_collective(node):
            args, kwargs = interpreter.fetch_args_kwargs_from_env(node)
            assert not kwargs, f"{node.name}: collectives take positional arguments"
            interpreter.env[node] = yield Meeting(node, args[0], tuple(args[1:-1]), str(args[-1]))
        elif node.target is _c10d.wait_tensor.default:
            interpreter.env[node] = interpreter.env[node.args[0]]
        else:
            interpreter.env[node] = interpreter.run_node(node)
    raise AssertionError("graph without output")


def _is_collective(node: fx.Node) -> bool:
    return group_of(node) is not None


def group_ranks(group: str, rank: int, mesh: Mesh) -> tuple[int, ...]:
    """Ranks of the group of `rank` over the axes named in `group`, ascending (row-major)."""
    axes = [mesh.axis_names.index(name) for name in group.split("+")]
    assert axes == sorted(axes), f"group {group!r} is not in mesh order {mesh.axis_names}"
    fixed = [axis for axis in range(len(mesh.shape)) if axis not in axes]
    own = mesh.coordinate(rank)
    return tuple(
        other for other in range(mesh.size) if all(mesh.coordinate(other)[axis] == own[axis] for axis in fixed)
    )


def _meet(waiting: dict[int, Meeting], mesh: Mesh) -> Iterator[tuple[int, Any]]:
    done: set[int] = set()
    for rank, meeting in waiting.items():
        ranks = group_ranks(meeting.group, rank, mesh)
        if rank in done or any(r not in waiting or waiting[r].group != meeting.group for r in ranks):
            continue
        done.update(ranks)
        meetings = [waiting[r] for r in ranks]
        targets = {m.node.target for m in meetings}
        assert len(targets) == 1, f"ranks {ranks} meet in different collectives: {[m.node.name for m in meetings]}"
        assert not meeting.tensor.is_complex(), f"{meeting.node.name}: no backend has collectives of complex numbers"
        collective = _COLLECTIVES[meeting.node.target]
        yield from zip(ranks, collective(meetings), strict=True)


def _reduce(tensors: list[Tensor], op: str) -> Tensor:
    assert len({t.shape for t in tensors}) == 1, f"shapes differ: {[tuple(t.shape) for t in tensors]}"
    assert len({t.dtype for t in tensors}) == 1, f"dtypes differ: {[t.dtype for t in tensors]}"
    stacked = torch.stack(tensors)
    if op in ("sum", "avg"):
        total = stacked.sum(0, dtype=stacked.dtype)
        return total / len(tensors) if op == "avg" else total
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def _same_arguments(meetings: list[Meeting]) -> tuple[Any, ...]:
    assert len({m.arguments for m in meetings}) == 1, f"arguments differ: {[(m.node, m.arguments) for m in meetings]}"
    return meetings[0].arguments


def _all_reduce(meetings: list[Meeting]) -> list[Tensor]:
    (op,) = _same_arguments(meetings)
    total = _reduce([m.tensor for m in meetings], op)
    return [total.clone() for _ in meetings]


def _all_gather(meetings: list[Meeting]) -> list[Tensor]:
    (size,) = _same_arguments(meetings)
    assert size == len(meetings), f"{meetings[0].node.name}: group_size {size}, group has {len(meetings)} ranks"
    tensors = [m.tensor for m in meetings]
    assert len({t.shape for t in tensors}) == 1, f"all_gather of different shapes: {[tuple(t.shape) for t in tensors]}"
    gathered = torch.cat(tensors)
    return [gathered.clone() for _ in meetings]


def _reduce_scatter(meetings: list[Meeting]) -> list[Tensor]:
    op, size = _same_arguments(meetings)
    total = _reduce([m.tensor for m in meetings], op)
    assert size == len(meetings)
    assert total.shape[0] % size == 0, f"reduce_scatter of {tuple(total.shape)} over {size}"
    return [part.clone() for part in total.chunk(size)]


def _all_to_all(meetings: list[Meeting]) -> list[Tensor]:
    size = len(meetings)
    sent = [m.tensor.split(list(m.arguments[1]) or [m.tensor.shape[0] // size] * size) for m in meetings]
    received = [torch.cat([sent[source][target] for source in range(size)]) for target in range(size)]
    for meeting, tensor in zip(meetings, received, strict=True):
        expected = sum(meeting.arguments[0]) if meeting.arguments[0] else tensor.shape[0]
        assert tensor.shape[0] == expected, f"{meeting.node.name}: receives {tensor.shape[0]} rows, expects {expected}"
    return received


def _gathered_products(meetings: list[Meeting]) -> list[tuple[Tensor, ...]]:
    """As torch documents `fused_all_gather_matmul`, of values as a whole."""
    _, lead, dim, keep = meetings[0].arguments
    assert len({m.arguments[1:] for m in meetings}) == 1, f"arguments differ: {[m.arguments[1:] for m in meetings]}"
    rows = torch.cat([m.tensor.reshape(*lead, m.tensor.shape[-1]) for m in meetings], dim).flatten(0, -2)
    return [(*(rows @ weight for weight in m.arguments[0]), *((rows.clone(),) if keep else ())) for m in meetings]


def _product_scattered(meetings: list[Meeting]) -> list[Tensor]:
    """As torch documents `fused_matmul_reduce_scatter`, of values as a whole."""
    _, lead, dim, op = meetings[0].arguments
    assert len({m.arguments[1:] for m in meetings}) == 1, f"arguments differ: {[m.arguments[1:] for m in meetings]}"
    total = _reduce([m.tensor @ m.arguments[0] for m in meetings], op)
    parts = total.reshape(*lead, total.shape[-1]).chunk(len(meetings), dim)
    return [part.flatten(0, -2).clone() for part in parts]


def _broadcast(meetings: list[Meeting]) -> list[Tensor]:
    (source,) = _same_arguments(meetings)
    return [meetings[source].tensor.clone() for _ in meetings]


def _each(meetings: list[Meeting], collective: Any) -> list[list[Tensor]]:
    """A coalesced collective: the single one for every tensor of the list."""
    results = []
    for index in range(len(meetings[0].tensor)):
        single = [Meeting(m.node, m.tensor[index], m.arguments, m.group) for m in meetings]
        results.append(collective(single))
    return [list(parts) for parts in zip(*results, strict=True)]


_COLLECTIVES = {
    _c10d.all_reduce.default: _all_reduce,
    _c10d.all_reduce_.default: _all_reduce,
    _c10d.all_gather_into_tensor.default: _all_gather,
    _c10d.reduce_scatter_tensor.default: _reduce_scatter,
    _c10d.all_to_all_single.default: _all_to_all,
    _c10d.broadcast.default: _broadcast,
    gathered_products: _gathered_products,
    product_scattered: _product_scattered,
    _c10d.all_reduce_coalesced.default: lambda meetings: _each(meetings, _all_reduce),
    _c10d.all_gather_into_tensor_coalesced.default: lambda meetings: _each(meetings, _all_gather),
    _c10d.reduce_scatter_tensor_coalesced.default: lambda meetings: _each(meetings, _reduce_scatter),
}
