"""Proof of a rule by execution: shard the operands, run the local form on every rank, reassemble, compare.

Used by the tests of the rules; a check that fails raises AssertionError with the operator, the choice and the mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.layouts.placement import Layout, Mesh, Partial, Placement, Replicate, Shard, is_legal, local_runs
from autopar.ops.random_index import reference_seed
from autopar.passes.lowering.local_call import LocalContext, emit_local_call
from autopar.plans.plan_value import OperatorPlan
from autopar.rules.engine import tensor_operands
from autopar.rules.rule import Rule
from autopar.rules.rule import Tensor as Dims
from tests.simulated_ranks import run_ranks

LINEAR = "partial"


@dataclass(frozen=True)
class Captured:
    """One call as a captured graph has it, with its operands and its plain results."""

    node: fx.Node
    operands: list[Tensor]
    results: tuple[Any, ...]


def capture_call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """A graph with one call of `target`; tensors become placeholders."""
    graph = fx.Graph()

    def placeholder(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = value
        return node

    graph_args, graph_kwargs = pytree.tree_map(placeholder, (args, kwargs))
    node = graph.call_function(target, tuple(graph_args), graph_kwargs)
    value = target(*args, **kwargs)
    node.meta.update(val=tuple(value) if isinstance(value, list) else value, phase="forward", operator="op#0")
    operands = [operand.meta["val"] for operand in tensor_operands(node)]
    return Captured(node, operands, tuple(value) if isinstance(value, tuple | list) else (value,))


def split_layouts(
    rule: Rule, names: Sequence[str | None], stride: int = 1
) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Layouts of operands and outputs when mesh axis i splits names[i], seen as (stride, rest), along the rest."""
    inputs = tuple(tuple(_placement(t, name, rule, None, stride) for name in names) for t in rule.inputs)
    outputs = tuple(
        tuple(_placement(t, name, rule, i, stride) for name in names) if t is not None else (Replicate(),) * len(names)
        for i, t in enumerate(rule.outputs)
    )
    return inputs, outputs


def _placement(tensor: Dims, name: str | None, rule: Rule, output: int | None, stride: int) -> Placement:
    for dim, factors in enumerate(tensor):
        if name is not None and name in factors:
            outer = factors[: factors.index(name)]
            return Shard(dim, stride * math.prod(rule.sizes[factor] for factor in outer if factor is not None))
    op = rule.reductions[name][output] if output is not None and name in rule.reductions else None
    return Partial(op) if op else Replicate()


def is_possible(captured: Captured, rule: Rule, names: Sequence[str | None], mesh: Mesh, stride: int = 1) -> bool:
    """Whether every operand and output can be laid out so; factors of fused dims divide evenly."""
    for name in set(names) - {None}:
        cut = stride * math.prod(n for n, other in zip(mesh.shape, names, strict=True) if other == name)
        if name is not None and rule.sizes[name] % cut and not _is_alone(rule, name):
            return False
    inputs, outputs = split_layouts(rule, names, stride)
    pairs = [(x.shape, layout) for x, layout in zip(captured.operands, inputs, strict=True)]
    pairs += [(x.shape, layout) for x, layout in zip(captured.results, outputs, strict=True) if isinstance(x, Tensor)]
    return all(is_legal(tuple(shape), layout, mesh) for shape, layout in pairs)


def _is_alone(rule: Rule, name: str) -> bool:
    """Whether the name never shares a dim with another factor."""
    tensors = [*rule.inputs, *(tensor for tensor in rule.outputs if tensor is not None)]
    return all(len(dim) == 1 for tensor in tensors for dim in tensor if name in dim)


def check_split(captured: Captured, rule: Rule, names: Sequence[str | None], mesh: Mesh, stride: int = 1) -> None:
    """Fails unless the split run equals the plain one."""
    inputs, outputs = split_layouts(rule, names, stride)
    plan = OperatorPlan(axes=tuple(names), inputs=inputs, outputs=outputs)
    blocks = [
        [_block(x, layout, mesh, mesh.coordinate(rank)) for x, layout in zip(captured.operands, inputs, strict=True)]
        for rank in range(mesh.size)
    ]
    _run_and_compare(captured, plan, blocks, mesh)


def check_linear(captured: Captured, marks: Sequence[bool], num_parts: int) -> None:
    """Fails unless the operator passes Partial(sum) operands on: marked operands are split into summands."""
    mesh = Mesh(("tp",), (num_parts,))
    inputs: tuple[Layout, ...] = tuple((Partial() if mark else Replicate(),) for mark in marks)
    plan = OperatorPlan(axes=(LINEAR,), inputs=inputs, outputs=((Partial(),),) * len(captured.results))
    summands = [
        _summands(x, num_parts) if mark else [x] * num_parts for x, mark in zip(captured.operands, marks, strict=True)
    ]
    blocks = [[parts[rank] for parts in summands] for rank in range(num_parts)]
    _run_and_compare(captured, plan, blocks, mesh)


def _summands(x: Tensor, num_parts: int) -> list[Tensor]:
    parts = [x * (index + 2) for index in range(num_parts - 1)]
    return [*parts, x - sum(parts)] if parts else [x]


def _run_and_compare(captured: Captured, plan: OperatorPlan, blocks: list[list[Tensor]], mesh: Mesh) -> None:
    graphs = [local_graph(captured.node, plan, mesh, rank) for rank in range(mesh.size)]
    seed = reference_seed(torch.device("cpu"))
    values = run_ranks(graphs, [[*block, seed] for block in blocks], mesh)
    where = f"{captured.node.target} {plan.axes} on {mesh.shape}"
    for index, expected in enumerate(captured.results):
        if isinstance(expected, Tensor):
            parts = [value[index] for value in values]
            if "empty" in str(captured.node.target):
                parts = [part.fill_(1.0) for part in parts]
                expected = torch.ones_like(expected)
            found = reassemble(parts, tuple(expected.shape), plan.outputs[index], mesh, where)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9, msg=_message(f"{where}, output {index}"))


def _message(where: str) -> Callable[[str], str]:
    return lambda text: f"{where}: {text}"


def local_graph(node: fx.Node, plan: OperatorPlan, mesh: Mesh, rank: int) -> fx.Graph:
    """The graph of one rank: a placeholder per tensor operand, the seed, and the local form of the call."""
    graph = fx.Graph()
    operands = iter([graph.placeholder(f"x{index}") for index in range(len(tensor_operands(node)))])
    seed_at = list(tensor_operands(node))

    def local(argument: Any) -> Any:
        return next(operands) if argument in seed_at else argument

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), local)
    seed = graph.placeholder("seed")
    context = LocalContext(node=node, plan=plan, mesh=mesh, coordinate=mesh.coordinate(rank), graph=graph, seed=seed)
    graph.output(emit_local_call(context, args, kwargs))
    return graph


@lru_cache(maxsize=4096)  # few sizes and layouts, asked for by every operator
def _indices(shape: tuple[int, ...], layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> list[Tensor]:
    """Per dim, the global indices that a rank holds."""
    runs = [local_runs(size, layout, dim, mesh, coordinate) for dim, size in enumerate(shape)]
    empty = torch.empty(0, dtype=torch.long)
    return [torch.cat([empty, *[torch.arange(s, s + length) for s, length in dim]]) for dim in runs]


def _block(x: Tensor, layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> Tensor:
    for dim, indices in enumerate(_indices(tuple(x.shape), layout, mesh, coordinate)):
        x = x.index_select(dim, indices)
    return x.clone()


def reassemble(parts: list[Tensor], shape: tuple[int, ...], layout: Layout, mesh: Mesh, where: str) -> Tensor:
    """The global tensor from the blocks of all ranks; replicated coordinates must agree."""
    combined: dict[tuple[int, ...], Tensor] = {}
    for rank, part in enumerate(parts):
        coordinate = mesh.coordinate(rank)
        key = tuple(c if isinstance(p, Shard) else 0 for c, p in zip(coordinate, layout, strict=True))
        combined[key] = _combine(combined[key], part, layout, coordinate, where) if key in combined else part
    result = torch.empty(shape, dtype=parts[0].dtype)
    filled = torch.zeros(shape, dtype=torch.long)
    for key, part in combined.items():
        indices = _indices(shape, layout, mesh, key)
        local = tuple(len(i) for i in indices)
        assert tuple(part.shape) == local, f"{where}: local shape {tuple(part.shape)}, the layout says {local}"
        if all(local):
            grid = torch.meshgrid(*indices, indexing="ij") if indices else ()
            result[grid] = part
            filled[grid] += 1
    assert bool((filled == 1).all()), f"{where}: blocks do not tile the output"
    return result


def _combine(total: Tensor, part: Tensor, layout: Layout, coordinate: tuple[int, ...], where: str) -> Tensor:
    """Add one coordinate of the axes that do not shard; at most one of these is not at its first position per call
    for replicated axes, so equal values are compared and partial ones reduced."""
    ops = {p.op for p in layout if isinstance(p, Partial)}
    replicated_moved = any(isinstance(p, Replicate) and c for p, c in zip(layout, coordinate, strict=True))
    if not ops:
        torch.testing.assert_close(part, total, equal_nan=True, msg=_message(f"{where}: ranks differ"))
        return total
    if replicated_moved:
        return total
    (op,) = ops
    return {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op](total, part)


def name_pairs(rule: Rule) -> list[tuple[str, str]]:
    """Every ordered choice of two names, equal ones too, that leaves one kind of Partial per output."""
    pairs = itertools.product(rule.names, repeat=2)
    return [pair for pair in pairs if _reduces_alike(rule, pair)]


def _reduces_alike(rule: Rule, names: Sequence[str]) -> bool:
    for index in range(len(rule.outputs)):
        ops = {rule.reductions[n][index] for n in names if n in rule.reductions} - {None}
        if len(ops) > 1:
            return False
    return True
