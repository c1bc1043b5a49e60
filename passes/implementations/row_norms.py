"""Layer norm and RMS norm over split dims: the sums of every row are all_reduced.

layer norm   the sum, then the squares around the mean     RMS norm   the squares     backward   once, all sums
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.ops import norms, rows
from autopar.passes.implementations.local_context import LocalContext
from autopar.rules.call import tensor_operands


def _split_norm(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    x, is_layer_norm = args[0], _is_layer_norm(context)
    dims, count, axes = _normalised(context)
    shape, wide = _row_statistics(context, context.output_shape(), dims)
    total = None
    if is_layer_norm:
        total = context.describe(context.call(rows.row_sums, x, dims), shape, wide)
        total = context.all_reduce(total, axes)
    squares = context.describe(context.call(rows.row_squares, x, total, dims, count), shape, wide)
    squares = context.all_reduce(squares, axes)
    weight, eps = context.argument(args, kwargs, "weight"), context.global_argument("eps")
    if is_layer_norm:
        bias = context.argument(args, kwargs, "bias")
        made = context.call(rows.layer_norm_block, x, weight, bias, total, squares, count, eps)
    else:
        rounds = context.node.target.namespace == "autopar"  # type: ignore[union-attr]  # an operator
        made = context.call(rows.rms_norm_block, x, weight, squares, count, eps, rounds)
    made.meta["dtype"] = (context.global_output().dtype, *[wide] * (1 + is_layer_norm))
    return made


def _split_norm_backward(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    grad, x = args[:2]
    dims, count, axes = _normalised(context)
    mean = context.argument(args, kwargs, "mean") if _is_layer_norm(context) else None
    rstd, weight = (context.argument(args, kwargs, name) for name in ("rstd", "weight"))
    global_shape = tuple(context.global_argument("input").meta["val"].shape)
    shape, wide = _row_statistics(context, context.input_shape(1, global_shape), dims)
    sums = context.call(rows.norm_gradient_sums, grad, x, mean, rstd, weight, dims)
    sums = context.describe(sums, (1 if mean is None else 2, *shape), wide)
    sums = context.all_reduce(sums, axes)
    num_vectors = 1 if mean is None else 2
    return context.call(rows.norm_gradients, grad, x, mean, rstd, weight, sums, count, dims, num_vectors)


def _split_our_norm_backward(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """As above, of the norms of ours: what is added to the gradient of the row is there behind the sums."""
    grad, x = args[:2]
    dims, count, axes = _normalised(context)
    is_layer_norm = _is_layer_norm(context)
    mean = context.argument(args, kwargs, "mean") if is_layer_norm else None
    rstd, weight, added = (context.argument(args, kwargs, name) for name in ("rstd", "weight", "added"))
    shape, wide = _row_statistics(context, context.output_shape(), dims)
    sums = context.call(rows.norm_gradient_sums, grad, x, mean, rstd, weight, dims)
    sums = context.all_reduce(context.describe(sums, (1 + is_layer_norm, *shape), wide), axes)
    return context.call(norms.gradient_block, grad, x, weight, mean, rstd, added, sums, count)


def _is_layer_norm(context: LocalContext) -> bool:
    return "layer_norm" in str(context.node.target)


def _normalised(context: LocalContext) -> tuple[list[int], int, tuple[int, ...]]:
    """(normalised dims, elements of a row, mesh axes that split these)."""
    x = _rows(context).meta["val"]
    arguments = {argument.name for argument in context.node.target._schema.arguments}  # type: ignore[union-attr]
    sizes = context.global_argument("normalized_shape") if "normalized_shape" in arguments else x.shape[-1:]
    names = frozenset({"n", *(f"n{i}" for i in range(len(sizes)))})
    return list(range(x.dim() - len(sizes), x.dim())), math.prod(sizes), context.axes_of(names)


def _rows(context: LocalContext) -> fx.Node:
    """What is normalised, as captured; in backward it stands behind the gradient."""
    return tensor_operands(context.node)[1 if "backward" in str(context.node.target) else 0]


def _row_statistics(
    context: LocalContext, shape: tuple[int, ...], dims: list[int]
) -> tuple[tuple[int, ...], torch.dtype]:
    """(local shape, dtype) of one number per row."""
    x = _rows(context).meta["val"]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return tuple(1 if dim in dims else size for dim, size in enumerate(shape)), wide


IMPLEMENTATIONS = {
    "split_norm": _split_norm,
    "split_norm_backward": _split_norm_backward,
    "split_our_norm_backward": _split_our_norm_backward,
}
