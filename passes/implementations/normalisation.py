"""Norms whose statistics cross a split: the statistics of a batch or group norm are summed over the ranks.

sums = channel_sums(x); all_reduce; squares = centred_squares(x, sums); all_reduce; normalise_batch(...)
sums = group_sums(x, groups); all_reduce; ...        where a group's channels or its positions are split
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.ops import group_statistics, statistics
from autopar.passes.implementations.local_context import LocalContext, replace_argument


def _batch_norm(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Two all_reduces of one number per channel: the sum, then the squares around the global mean."""
    x, axes = args[0], _axes_without(context, "c")
    count, channels, wide = _batch_norm_sizes(context, "input")
    total = context.describe(context.call(statistics.channel_sums, x), (channels,), wide)
    total = context.all_reduce(total, axes)
    squares = context.describe(context.call(statistics.centred_squares, x, total, count), (channels,), wide)
    squares = context.all_reduce(squares, axes)
    names = {argument.name for argument in context.node.target._schema.arguments}  # type: ignore[union-attr]
    weight, bias = (context.argument(args, kwargs, name) for name in ("weight", "bias"))
    running = [context.argument(args, kwargs, n) if n in names else None for n in ("running_mean", "running_var")]
    momentum, eps = (context.global_argument(name) for name in ("momentum", "eps"))
    return context.call(statistics.normalise_batch, x, weight, bias, *running, total, squares, count, momentum, eps)


def _batch_norm_backward(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """One all_reduce of two numbers per channel, which are also the gradients of weight and bias."""
    grad, x = args[0], args[1]
    count, channels, wide = _batch_norm_sizes(context, "input")
    weight, mean, invstd = (context.argument(args, kwargs, n) for n in ("weight", "save_mean", "save_invstd"))
    sums = context.call(statistics.batch_norm_gradient_sums, grad, x, mean, invstd)
    sums = context.all_reduce(context.describe(sums, (2, channels), wide), _axes_without(context, "c"))
    return context.call(statistics.batch_norm_gradients, grad, x, weight, mean, invstd, sums, count)


def _batch_norm_sizes(context: LocalContext, name: str) -> tuple[int, int, torch.dtype]:
    """(global elements per channel, local channels, dtype of the statistics)."""
    x = context.global_argument(name).meta["val"]
    channels = context.output_shape()[1]
    return math.prod(x.shape) // x.shape[1], channels, _wide(x.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _axes_without(context: LocalContext, *names: str) -> tuple[int, ...]:
    """Mesh axes that split a dim over which the statistics run: any but `names`."""
    return tuple(axis for axis, name in enumerate(context.plan.axes) if name is not None and name not in names)


def _synchronised_group_norm(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Two all_reduces of one number per sample and group."""
    x, axes = args[0], _axes_without(context, "b", "g")
    shape, count, dtype = context.output_shape(1), _group_size(context), _wide(context.global_output().dtype)
    total = context.describe(context.call(group_statistics.group_sums, x, shape[1]), shape, dtype)
    total = context.all_reduce(total, axes)
    squares = context.describe(context.call(group_statistics.group_squares, x, total, count), shape, dtype)
    squares = context.all_reduce(squares, axes)
    weight, bias = (context.argument(args, kwargs, name) for name in ("weight", "bias"))
    eps = context.global_argument("eps")
    return context.call(group_statistics.normalise_groups, x, weight, bias, total, squares, count, eps)


def _synchronised_group_norm_backward(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """One all_reduce of two numbers per sample and group; gradients of weight and bias are those of the block."""
    grad, x, mean, rstd = args[:4]
    weight, mask = context.argument(args, kwargs, "weight"), context.global_argument("output_mask")
    global_mean = context.global_argument("mean").meta["val"]
    shape, dtype = context.input_shape(2, tuple(global_mean.shape)), _wide(global_mean.dtype)
    sums = context.call(group_statistics.group_gradient_sums, grad, x, mean, rstd, weight)
    sums = context.all_reduce(context.describe(sums, (2, *shape), dtype), _axes_without(context, "b", "g"))
    count = _group_size(context)
    return context.call(group_statistics.group_norm_gradients, grad, x, mean, rstd, weight, sums, count, list(mask))


def _group_size(context: LocalContext) -> int:
    """Global number of elements of one group of one sample."""
    shape = context.global_argument("input").meta["val"].shape
    return int(math.prod(shape[1:])) // int(context.global_argument("group"))


def _group_norm(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    return _with_group_sizes(context, args, kwargs, context.output_shape(), context.output_shape(1)[1])


def _group_norm_backward(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    mean_shape = tuple(context.global_argument("mean").meta["val"].shape)
    groups = context.input_shape(2, mean_shape)[1]
    x_shape = tuple(context.global_argument("input").meta["val"].shape)
    return _with_group_sizes(context, args, kwargs, context.input_shape(1, x_shape), groups)


def _with_group_sizes(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...], groups: int
) -> fx.Node:
    """The operator with N, C and group of the local block."""
    target: Any = context.node.target
    for name, value in (("N", shape[0]), ("C", shape[1]), ("group", groups)):
        args, kwargs = replace_argument(target, args, kwargs, name, value)
    return context.call_operator(args, kwargs)


IMPLEMENTATIONS = {
    "synchronised_batch_norm": _batch_norm,
    "synchronised_batch_norm_backward": _batch_norm_backward,
    "synchronised_group_norm": _synchronised_group_norm,
    "synchronised_group_norm_backward": _synchronised_group_norm_backward,
}
REWRITES = {
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
}
