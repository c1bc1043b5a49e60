"""Lookups and writes along a split dim: `autopar.ops.masked` with the start of the block of this rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ops import masked
from autopar.passes.implementations.local_context import LocalContext


def _size(context: LocalContext, name: str, dim: int) -> int:
    """Global size of a dim of the operand that is argument `name`."""
    return int(context.global_argument(name).meta["val"].shape[dim])


def _dim(context: LocalContext) -> int:
    rank = context.global_argument("self").meta["val"].dim()
    return int(context.global_argument("dim")) % int(rank)


def _embedding(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    start = context.input_start(0, 0, _size(context, "weight", 0))
    return context.call(masked.masked_embedding, args[0], args[1], start)


def _embedding_backward(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    start, num_rows = context.output_start(0, 0), context.output_shape()[0]
    options = [context.global_argument(name) for name in ("padding_idx", "scale_grad_by_freq")]
    return context.call(masked.masked_embedding_backward, args[0], args[1], start, num_rows, *options)


def _gather(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    dim = _dim(context)
    start = context.input_start(0, dim, _size(context, "self", dim))
    return context.call(masked.masked_gather, args[0], dim, args[2], start)


def _scatter(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    dim = _dim(context)
    return context.call(masked.masked_scatter, args[0], dim, args[2], args[3], context.output_start(0, dim))


def _with_base_once(context: LocalContext, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positions (names i...) are split: the results are summed, so only one coordinate keeps what it adds to."""
    axes = [axis for axis, name in enumerate(context.plan.axes) if name is not None and name.startswith("i")]
    if any(context.coordinate[axis] for axis in axes):
        return (context.call(torch.ops.aten.zeros_like.default, args[0]), *args[1:])
    return args


def _is_split(context: LocalContext) -> bool:
    """Whether the dim that is written is split."""
    return "v" in context.plan.axes


def _scatter_add(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    args, dim = _with_base_once(context, args), _dim(context)
    if not _is_split(context):
        return context.call_operator(args, kwargs)
    return context.call(masked.masked_scatter_add, args[0], dim, args[2], args[3], context.output_start(0, dim))


def _index_add(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    args, dim = _with_base_once(context, args), _dim(context)
    if not _is_split(context):
        return context.call_operator(args, kwargs)
    start, size = context.output_start(0, dim), _size(context, "self", dim)
    alpha = context.global_argument("alpha")
    return context.call(masked.masked_index_add, args[0], dim, args[2], args[3], alpha, start, size)


def _index_copy(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    dim = _dim(context)
    start, size = context.output_start(0, dim), _size(context, "self", dim)
    return context.call(masked.masked_index_copy, args[0], dim, args[2], args[3], start, size)


def _index(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    dim, index = next((dim, index) for dim, index in enumerate(args[1]) if index is not None)
    size = _size(context, "self", dim)
    return context.call(masked.masked_index, args[0], dim, index, context.input_start(0, dim, size), size)


def _index_select(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    dim = _dim(context)
    size = _size(context, "self", dim)
    return context.call(masked.masked_index, args[0], dim, args[2], context.input_start(0, dim, size), size)


def _index_put(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    args = _with_base_once(context, args)
    if not _is_split(context):
        return context.call_operator(args, kwargs)
    dim, index = next((dim, index) for dim, index in enumerate(args[1]) if index is not None)
    accumulate = bool(context.global_argument("accumulate"))
    start, size = context.output_start(0, dim), _size(context, "self", dim)
    return context.call(masked.masked_index_put, args[0], dim, index, args[2], accumulate, start, size)


IMPLEMENTATIONS = {
    "masked_embedding": _embedding,
    "masked_embedding_backward": _embedding_backward,
    "masked_gather": _gather,
    "masked_scatter": _scatter,
    "masked_scatter_add": _scatter_add,
    "masked_index_add": _index_add,
    "masked_index_copy": _index_copy,
    "masked_index_fill": _index_copy,
    "masked_index": _index,
    "masked_index_select": _index_select,
    "masked_index_put": _index_put,
}
