"""Norms whose statistics cross a split: batch norm over a split batch sums its statistics over the ranks.

sums = channel_sums(x); all_reduce; squares = centred_squares(x, sums); all_reduce; normalise_batch(...)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.ops import statistics
from autopar.passes.local_context import LocalContext, replace_argument


def _batch_norm(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Two all_reduces of one number per channel: the sum, then the squares around the global mean."""
    x, axes = args[0], context.axes_of(frozenset({"b"}))
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
    sums = context.all_reduce(context.describe(sums, (2, channels), wide), context.axes_of(frozenset({"b"})))
    return context.call(statistics.batch_norm_gradients, grad, x, weight, mean, invstd, sums, count)


def _batch_norm_sizes(context: LocalContext, name: str) -> tuple[int, int, torch.dtype]:
    """(global elements per channel, local channels, dtype of the statistics)."""
    x = context.global_argument(name).meta["val"]
    channels = context.output_shape()[1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return math.prod(x.shape) // x.shape[1], channels, wide


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
    """The operator with N, C and group of the local block.

    torch's group norm reads its operands as if they were contiguous, without a check: a strided one gives wrong values.
    """
    target: Any = context.node.target
    args, kwargs = fx.node.map_arg((args, kwargs), lambda x: context.call(torch.ops.aten.contiguous.default, x))
    for name, value in (("N", shape[0]), ("C", shape[1]), ("group", groups)):
        args, kwargs = replace_argument(target, args, kwargs, name, value)
    return context.call_operator(args, kwargs)


IMPLEMENTATIONS = {
    "synchronised_batch_norm": _batch_norm,
    "synchronised_batch_norm_backward": _batch_norm_backward,
}
REWRITES = {
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
}
