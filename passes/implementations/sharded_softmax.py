"""Softmax along a split dim: one all_reduce of the maxima and one of the sums; its gradient needs one of sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ops import softmax
from autopar.passes.implementations.local_context import LocalContext


def _split_softmax(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    name, x = str(context.node.target), args[0]
    rank, axes = context.global_output().dim(), context.axes_of(frozenset({"n"}))
    dim = context.global_argument("dim") % rank
    shape, wide = _row_statistics(context, dim)
    maximum = context.describe(context.call(softmax.largest, x, dim), shape, wide)
    maximum = context.all_reduce(maximum, axes, "max")
    total = context.describe(context.call(softmax.exp_sums, x, maximum, dim), shape, wide)
    total = context.all_reduce(total, axes)
    dtype = context.global_output().dtype
    if "_log_softmax" in name:
        return context.call(softmax.log_softmax_block, x, maximum, total, dtype)
    return context.call(softmax.softmax_block, x, maximum, total, dtype, "_safe_softmax" in name)


def _split_softmax_backward(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    grad, out = args[:2]
    dim = context.global_argument("dim") % context.global_output().dim()
    is_log = "_log_softmax" in str(context.node.target)
    if is_log:
        sums = context.call(softmax.log_softmax_gradient_sums, grad, dim)
    else:
        sums = context.call(softmax.softmax_gradient_sums, grad, out, dim)
    sums = context.all_reduce(context.describe(sums, *_row_statistics(context, dim)), context.axes_of(frozenset({"n"})))
    function = softmax.log_softmax_gradient if is_log else softmax.softmax_gradient
    return context.call(function, grad, out, sums, context.global_output().dtype)


def _row_statistics(context: LocalContext, dim: int) -> tuple[tuple[int, ...], torch.dtype]:
    """(local shape, dtype) of one number per row; fp64 stays fp64."""
    dtypes = [argument.meta["val"].dtype for argument in context.node.args if isinstance(argument, fx.Node)]
    shape = context.output_shape()
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    return (*shape[:dim], 1, *shape[dim + 1 :]), wide


IMPLEMENTATIONS = {"split_softmax": _split_softmax, "split_softmax_backward": _split_softmax_backward}
