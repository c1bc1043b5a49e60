"""Reductions over a split dim that are no plain call.

A mean divides by the global count; a variance, a logsumexp and a norm all_reduce statistics and finish everywhere.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from autopar.ops import split_statistics
from autopar.ops.statistics import local_mean
from autopar.passes.implementations.local_context import LocalContext
from autopar.rules.call import tensor_operands


def _reduced_dims(context: LocalContext) -> list[int]:
    rank = tensor_operands(context.node)[0].meta["val"].dim()
    names = {argument.name for argument in context.node.target._schema.arguments}  # type: ignore[union-attr]
    dims = context.global_argument("dim") if "dim" in names else None
    dims = [dims] if isinstance(dims, int) else dims
    return [dim % rank for dim in dims] if dims else list(range(rank))


def _mean(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    dims = _reduced_dims(context)
    shape = tensor_operands(context.node)[0].meta["val"].shape
    keepdim = len(context.global_output().shape) == len(shape)
    count = math.prod(shape[dim] for dim in dims)
    return context.call(local_mean, args[0], dims, keepdim, count, context.global_output().dtype)


def _variance(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Two all_reduces: the sum, then the squares around the global mean."""
    dims, dropped, shape = _split_dims(context)
    value = context.global_argument("self").meta["val"]
    count = math.prod(value.shape[dim] for dim in dims)
    total = _all_reduced(context, context.call(split_statistics.sums, args[0], dims), shape, dims)
    centred = context.call(split_statistics.squares, args[0], dims, total, count)
    centred = _all_reduced(context, centred, shape, dims)
    given = context.global_argument("correction")
    correction = 1 if given is None else given
    name = str(context.node.target)
    finish = split_statistics.deviation if "std" in name else split_statistics.variance
    function = split_statistics.variance_and_mean if "var_mean" in name else finish
    return context.call(function, total, centred, count, correction, dropped)


def _logsumexp(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """An all_reduce of the maximum, then one of the exponentials below it."""
    dims, dropped, shape = _split_dims(context)
    top = _all_reduced(context, context.call(split_statistics.largest, args[0], dims), shape, dims, "max")
    total = context.call(split_statistics.exponentials, args[0], dims, top)
    total = _all_reduced(context, total, shape, dims)
    return context.call(split_statistics.logarithm, total, top, dropped)


def _norm(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """One all_reduce of the sum of squares."""
    dims, dropped, shape = _split_dims(context)
    total = context.call(split_statistics.power, args[0], dims, context.global_output().dtype)
    return context.call(split_statistics.root, _all_reduced(context, total, shape, dims), dropped)


def _split_dims(context: LocalContext) -> tuple[list[int], list[int], tuple[int, ...]]:
    """(reduced dims, those that the output lacks, local shape of the statistics)."""
    dims = _reduced_dims(context)
    whole = tuple(context.global_argument("self").meta["val"].shape)
    local = context.input_shape(0, whole)
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(local))
    kept = len(context.global_output().shape) == len(whole)
    return dims, [] if kept else dims, shape


def _all_reduced(
    context: LocalContext, value: fx.Node, shape: tuple[int, ...], dims: list[int], op: str = "sum"
) -> fx.Node:
    axes = context.axes_of(frozenset(f"d{dim}" for dim in dims))
    return context.all_reduce(context.describe(value, shape, context.global_output().dtype), axes, op)


IMPLEMENTATIONS = {
    "local_mean": _mean,
    "synchronised_variance": _variance,
    "synchronised_logsumexp": _logsumexp,
    "synchronised_norm": _norm,
}
