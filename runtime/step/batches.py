"""Batches: the arguments of one call -> this rank's block of every input of the graph.

    batch="global"   every rank passes the same batch and keeps its block: no communication
    batch="local"    a rank passes its part: the global batch is the concatenation over the data shards

The data shards are the mesh axes that split the batch of some input in the first plan (`data_axes`). Where a plan
wants an input in another layout than that, the parts are gathered over the data axes and cut again.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from autopar._compat import TreeSpec, tree_flatten
from autopar.errors import ConfigurationError
from autopar.layouts.placement import Layout, Mesh, Replicate, Shard, local_shape, replicated, zigzag_cuts
from autopar.ops.blocks import in_zigzag
from autopar.plans.parallel_plan import Plan
from autopar.program import Input, Program
from autopar.runtime.parameters import from_local, full_tensor, local_block
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.differentiation import differentiated_once

BatchMode: TypeAlias = Literal["global", "local"]
Signature: TypeAlias = tuple[Any, ...]


def input_layout(plan: Plan, name: str) -> Layout:
    """Layout of the input `name`; replicated where the plan says nothing."""
    return plan.inputs.get(name, replicated(len(plan.layout_mesh.shape)))


def output_layout(plan: Plan, name: str) -> Layout:
    """Layout of the output `name`; replicated where the plan says nothing."""
    return plan.outputs.get(name, replicated(len(plan.layout_mesh.shape)))


def data_axes(plan: Plan, program: Program) -> tuple[int, ...]:
    """Mesh axes that split the batch dim of an input."""
    found = {
        axis
        for value in program.inputs
        if value.role == "input" and value.batch_dim is not None
        for axis, placement in enumerate(input_layout(plan, value.name))
        if placement == Shard(value.batch_dim)
    }
    return tuple(sorted(found))


def data_shard(groups: ProcessGroups, axes: Sequence[int]) -> tuple[int, int]:
    """(index, count): which of `count` parts of the global batch this rank passes with batch="local"."""
    mesh, coordinate = groups.mesh, groups.coordinate
    index = 0
    for axis in axes:
        index = index * mesh.shape[axis] + coordinate[axis]
    return index, math.prod(mesh.shape[axis] for axis in axes)


def data_layout(batch_dim: int | None, axes: Sequence[int], num_axes: int) -> Layout:
    """Layout of what the ranks pass with batch="local"."""
    if batch_dim is None:
        return replicated(num_axes)
    return tuple(Shard(batch_dim) if axis in axes else Replicate() for axis in range(num_axes))


def signature(leaves: Sequence[Any], spec: TreeSpec) -> Signature:
    """What must be equal for two calls to run the same graph: structure, shapes, dtypes, whose gradient is wanted, and
    constants."""
    return spec, tuple(
        (tuple(leaf.shape), leaf.dtype, wants_gradient(leaf)) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    )


def wants_gradient(leaf: Any) -> bool:
    """Whether an argument is a tensor whose gradient may be asked for behind the call."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled()


def input_leaves(program: Program) -> list[tuple[Input, int]]:
    """Every input with the index of the argument leaf that it takes."""
    inputs = [value for value in program.inputs if value.role == "input"]
    return list(zip(inputs, program.tensor_leaves, strict=True))


def ordered(args: tuple[Any, ...], kwargs: dict[str, Any], program: Program | None) -> tuple[list[Any], TreeSpec]:
    """Flatten the arguments of a call, keywords in the order of the example where it has the same ones."""
    if program is not None:
        names = tuple(program.in_spec.unflatten(range(program.in_spec.num_leaves))[1])
        if set(names) == set(kwargs):
            kwargs = {name: kwargs[name] for name in names}
    leaves, spec = tree_flatten((args, kwargs))
    return list(leaves), spec


def keep_block(tensor: torch.Tensor, layout: Layout, groups: ProcessGroups) -> torch.Tensor:
    """This rank's block of a tensor that every rank has; its gradient is gathered."""
    if wants_gradient(tensor):
        return exchange_block(tensor, tensor.shape, replicated(len(layout)), layout, groups)
    return local_block(tensor, layout, groups.mesh, groups.place).contiguous()


def exchange_block(
    tensor: torch.Tensor, shape: Sequence[int], passed: Layout, wanted: Layout, groups: ProcessGroups
) -> torch.Tensor:
    """Block in layout `wanted` of a tensor of global `shape` whose parts the ranks hold in layout `passed`.

    Its gradient goes the way back."""
    if passed == wanted:
        return tensor.contiguous()
    if wants_gradient(tensor):
        block: torch.Tensor = _Exchanged.apply(tensor, tuple(shape), passed, wanted, groups)  # type: ignore[no-untyped-call]
        return block
    parts = from_local(tensor.contiguous(), shape, passed, groups)
    whole = full_tensor(parts)
    for cut in zigzag_cuts(passed, groups.mesh):
        whole = in_zigzag(whole, *cut)
    return local_block(whole, wanted, groups.mesh, groups.place).contiguous()


class _Exchanged(torch.autograd.Function):
    """`exchange_block`, differentiably."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, shape: tuple[int, ...], passed: Layout, wanted: Layout, groups: ProcessGroups
    ) -> torch.Tensor:
        ctx.back = (shape, wanted, passed, groups)
        return exchange_block(tensor, shape, passed, wanted, groups)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return exchange_block(gradients[0], *ctx.back), None, None, None, None


def global_sizes(sizes: list[list[int]], axes: Sequence[int], mesh: Mesh) -> list[int]:
    """Global batch sizes from those of every rank. Raises ConfigurationError where the parts are not ceil blocks."""
    shards: dict[tuple[int, ...], list[int]] = {}
    for member, size in enumerate(sizes):
        coordinate = mesh.coordinate(member)
        shards.setdefault(tuple(coordinate[axis] for axis in axes), size)
    totals = [sum(column) for column in zip(*shards.values(), strict=True)]
    for position, total in enumerate(totals):
        layout = data_layout(0, axes, len(mesh.shape))
        expected = [local_shape((total,), layout, mesh, mesh.coordinate(member))[0] for member in range(len(sizes))]
        given = [size[position] for size in sizes]
        if given != expected:
            raise ConfigurationError(
                f'with batch="local" the parts of a batch of {total} must be {expected} (blocks of '
                f"ceil({total} / {len(shards)}) in the order of data_shard()), the ranks passed {given}"
            )
    return totals


def route(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], routes_batch: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """With a loss function, a batch may hold more than `forward` takes; the whole of it becomes the keyword `batch`.

    (input_ids, labels) -> (input_ids, batch={input_ids, labels})        where forward takes input_ids only
    """
    if not routes_batch or not kwargs:
        return args, kwargs
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return args, kwargs
    taken = {parameter.name for parameter in parameters}
    extra = kwargs.keys() - taken
    if not extra or extra == {"batch"}:
        return args, kwargs
    return args, {**{name: value for name, value in kwargs.items() if name in taken}, "batch": dict(kwargs)}
