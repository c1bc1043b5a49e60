"""Pooling and interpolation on blocks of rows.

A pooling runs on the extended block without padding (filled with 0, or -inf for a maximum). The positions that a
maximum saves count in the whole tensor, so they are moved from the extended block to there and back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.ops import halo as ops
from autopar.passes.implementations.halos import Halo, extend, fold, halo_along
from autopar.passes.implementations.local_context import LocalContext, replace_argument
from autopar.rules.call import call_of
from autopar.rules.windows import Window, per_dim, windows_of

LocalForm = Callable[[LocalContext, tuple[Any, ...], dict[str, Any]], fx.Node]


def _max_pool(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The operator on the extended block; its positions are moved to the whole tensor."""
    x = context.global_argument("self").meta["val"]
    halos = _halos(context, (0, x.shape), (context.plan.outputs[0], context.global_output().shape))
    lowest = -torch.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    args, kwargs, shape = _on_windows(context, args, kwargs, halos, (0, x), lowest)
    results = context.call_operator(args, kwargs)
    output = context.output_shape()
    context.describe(results, (output, output), (x.dtype, torch.int64))
    values = context.describe(context.call(operator.getitem, results, 0), output, x.dtype)
    positions = context.describe(context.call(operator.getitem, results, 1), output, torch.int64)
    count = len(_windows(context))
    moved = context.call(
        ops.moved_positions, positions, shape[-count:], _starts(halos, x.dim(), count), list(x.shape[-count:])
    )
    return context.call(ops.packed, values, context.describe(moved, output, torch.int64))


def _max_pool_backward(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Gradients are added at the positions in the window of this rank, then folded back."""
    x, grad = (context.global_argument(name).meta["val"] for name in ("self", "grad_output"))
    halos = _halos(context, (1, x.shape), (context.plan.inputs[0], grad.shape))
    shape, count = _grown(context.input_shape(1, tuple(x.shape)), halos), len(_windows(context))
    starts = [-start for start in _starts(halos, x.dim(), count)]
    indices = context.argument(args, kwargs, "indices")
    positions = context.call(ops.moved_positions, indices, list(x.shape[-count:]), starts, shape[-count:])
    context.describe(positions, context.input_shape(2, tuple(grad.shape)), torch.int64)
    node = context.describe(context.call(ops.scattered, args[0], positions, shape[-count:]), shape, x.dtype)
    return _folded(context, node, shape, x.dtype, halos)


def _avg_pool(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    x = context.global_argument("self").meta["val"]
    halos = _halos(context, (0, x.shape), (context.plan.outputs[0], context.global_output().shape))
    args, kwargs, _ = _on_windows(context, args, kwargs, halos, (0, x), 0.0)
    return context.call_operator(args, kwargs)


def _avg_pool_backward(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The operator for an input of the size of the window, whose values it does not read."""
    x, grad = (context.global_argument(name).meta["val"] for name in ("self", "grad_output"))
    halos = _halos(context, (1, x.shape), (context.plan.inputs[0], grad.shape))
    shape = _grown(context.input_shape(1, tuple(x.shape)), halos)
    like = context.describe(context.call(torch.ops.aten.new_empty.default, args[1], list(shape)), shape, x.dtype)
    args, kwargs = replace_argument(context.node.target, args, kwargs, "self", like)
    args, kwargs = _without_padding(context, args, kwargs, halos, x.dim())
    node = context.describe(context.call_operator(args, kwargs), shape, x.dtype)
    return _folded(context, node, shape, x.dtype, halos)


def _windows(context: LocalContext) -> tuple[Window, ...]:
    count = int(str(context.node.target).partition("_pool")[2][0])
    return windows_of(call_of(context.node), count, context.global_argument("kernel_size"))


def _halos(context: LocalContext, held: tuple[int, Any], produced: tuple[Any, Any]) -> list[Halo]:
    """One per split dim; held: (operand, shape) of the input, produced: (layout, shape) of the output."""
    windows, (operand, shape), (layout, output) = _windows(context), held, produced
    first = len(shape) - len(windows)
    return [
        halo_along(
            context,
            f"s{i}",
            (context.plan.inputs[operand], first + i, shape[first + i]),
            (layout, first + i, output[first + i]),
            window.rows,
        )
        for i, window in enumerate(windows)
        if context.axes_of(frozenset({f"s{i}"}))
    ]


def _on_windows(
    context: LocalContext,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    halos: list[Halo],
    held: tuple[int, torch.Tensor],
    value: float,
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[int, ...]]:
    """(args, kwargs, shape of the input) with the extended input and no padding in the dims of `halos`."""
    operand, whole = held
    x, shape = args[operand], context.input_shape(operand, tuple(whole.shape))
    for halo in halos:
        x, shape = extend(context, x, shape, whole.dtype, halo, value)
    args, kwargs = replace_argument(context.node.target, args, kwargs, "self", x)
    return *_without_padding(context, args, kwargs, halos, whole.dim()), shape


def _without_padding(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any], halos: list[Halo], rank: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    count = len(_windows(context))
    padding = list(per_dim(context.global_argument("padding"), count))
    for halo in halos:
        padding[halo.dim - rank + count] = 0
    return replace_argument(context.node.target, args, kwargs, "padding", padding)


def _grown(shape: tuple[int, ...], halos: list[Halo]) -> tuple[int, ...]:
    """The shape of the block with all windows."""
    grown = list(shape)
    for halo in halos:
        grown[halo.dim] = halo.window[1]
    return tuple(grown)


def _starts(halos: list[Halo], rank: int, count: int) -> list[int]:
    """Per spatial dim, the first row of the window in the whole tensor."""
    starts = [0] * count
    for halo in halos:
        starts[halo.dim - rank + count] = halo.window[0]
    return starts


def _folded(
    context: LocalContext, node: fx.Node, shape: tuple[int, ...], dtype: torch.dtype, halos: list[Halo]
) -> fx.Node:
    for halo in reversed(halos):
        node, shape = fold(context, node, shape, dtype, halo)
    return node


def _with_local_sizes(**outputs: str) -> LocalForm:
    """An interpolation with its size arguments set to those of the block."""

    def emit(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        for name, source in outputs.items():
            if source == "output":
                size = context.output_shape()
            else:
                size = context.input_shape(0, tuple(context.global_argument(source).meta["val"].shape))
            local = list(size) if name == "input_size" else list(size[2:])
            args, kwargs = replace_argument(context.node.target, args, kwargs, name, local)
        return context.call_operator(args, kwargs)

    return emit


_UPSAMPLING = (
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
)

IMPLEMENTATIONS = {
    "split_max_pool": _max_pool,
    "split_max_pool_backward": _max_pool_backward,
    "split_avg_pool": _avg_pool,
    "split_avg_pool_backward": _avg_pool_backward,
}
REWRITES = {
    **{f"aten.{name}.default": _with_local_sizes(output_size="output") for name in _UPSAMPLING},
    **{
        f"aten.{name}_backward.default": _with_local_sizes(output_size="grad_output", input_size="output")
        for name in _UPSAMPLING
    },
}
