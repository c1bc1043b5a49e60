"""Reductions over a split dim that are no plain call: a mean divides by the global count, an empty block has no
maximum."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.ops.statistics import local_mean
from autopar.passes.local_context import LocalContext
from autopar.rules.call import tensor_operands


def _reduced_dims(context: LocalContext) -> list[int]:
    rank = tensor_operands(context.node)[0].meta["val"].dim()
    names = {argument.name for argument in context.node.target._schema.arguments}  # type: ignore[union-attr]
    dims = context.global_argument("dim") if "dim" in names else None
    return [dim % rank for dim in dims] if dims else list(range(rank))


def _mean(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    dims = _reduced_dims(context)
    shape = tensor_operands(context.node)[0].meta["val"].shape
    keepdim = len(context.global_output().shape) == len(shape)
    count = math.prod(shape[dim] for dim in dims)
    return context.call(local_mean, args[0], dims, keepdim, count, context.global_output().dtype)


def _extreme(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The operator itself, or the neutral element where the block is empty."""
    shape = context.input_shape(0, tuple(tensor_operands(context.node)[0].meta["val"].shape))
    if all(shape[dim] for dim in _reduced_dims(context)):
        return context.graph.call_function(context.node.target, args, kwargs)  # type: ignore[arg-type]
    output = context.global_output()
    is_maximum = "max" in str(context.node.target)
    value = _lowest(output.dtype) if is_maximum else _highest(output.dtype)
    return context.call(
        torch.ops.aten.full.default, list(context.output_shape()), value, dtype=output.dtype, device=output.device
    )


def _lowest(dtype: torch.dtype) -> float | int:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float | int:
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


IMPLEMENTATIONS = {"local_mean": _mean, "local_extreme": _extreme}
