"""Reductions over a split dim that are no plain call: a mean divides by the global count."""

from __future__ import annotations

import math
from typing import Any

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


IMPLEMENTATIONS = {"local_mean": _mean}
