"""Convolutions on blocks: local groups, a bias added once when input channels are split, halos of split rows.

A convolution whose rows are split runs on the extended block without padding in that dim; its backward runs on the
same extended block, and the gradients of borrowed rows return to their owners.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.ops.blocks import added_once
from autopar.ops.halo import packed
from autopar.passes.implementations.halos import Halo, extend, fold, halo_along
from autopar.passes.implementations.local_context import LocalContext, replace_argument
from autopar.rules.call import call_of
from autopar.rules.windows import per_dim, windows_of


def _convolution(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Where input channels are split the outputs are summed, so only one coordinate adds the bias."""
    split = context.axes_of(frozenset({"ci"}))
    bias = context.argument(args, kwargs, "bias")
    if split and bias is not None:
        first = not any(context.coordinate[axis] for axis in split)
        args, kwargs = replace_argument(
            context.node.target, args, kwargs, "bias", context.call(added_once, bias, first)
        )
    halos = _halos(context, x_operand=0)
    args, kwargs, _ = _on_windows(context, args, kwargs, halos, x_operand=0)
    return _with_local_groups(context, args, kwargs)


def _split_backward(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The operator on extended blocks; then the gradient of the input is folded back."""
    halos = _halos(context, x_operand=1)
    args, kwargs, shape = _on_windows(context, args, kwargs, halos, x_operand=1)
    results = _convolution_backward(context, args, kwargs)
    mask = context.global_argument("output_mask")
    values = [context.output_shape(i) if wanted else None for i, wanted in enumerate(mask)]
    dtypes = tuple(context.global_output(i).dtype if wanted else None for i, wanted in enumerate(mask))
    shapes = (shape if mask[0] else None, *values[1:])
    context.describe(results, shapes, dtypes)  # type: ignore[arg-type]
    parts: list[fx.Node | None] = []
    for index, wanted in enumerate(mask):
        part = context.call(operator.getitem, results, index) if wanted else None
        parts.append(context.describe(part, shapes[index], dtypes[index]) if part is not None else None)  # type: ignore[arg-type]
    for halo in reversed(halos):
        if parts[0] is not None:
            parts[0], shape = fold(context, parts[0], shape, _dtype(context), halo)
    return context.call(packed, *parts)


def _convolution_backward(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    sizes = context.global_argument("bias_sizes")
    if sizes:
        shape = tuple(context.global_argument("grad_output").meta["val"].shape)
        local = context.input_shape(0, shape)[1]
        args, kwargs = replace_argument(context.node.target, args, kwargs, "bias_sizes", [local])
    return _with_local_groups(context, args, kwargs)


def _with_local_groups(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Every axis that splits the groups divides their number."""
    groups = context.global_argument("groups")
    for axis in context.axes_of(frozenset({"g"})):
        groups //= context.mesh.shape[axis]
    args, kwargs = replace_argument(context.node.target, args, kwargs, "groups", groups)
    return context.call_operator(args, kwargs)


def _halos(context: LocalContext, x_operand: int) -> list[Halo]:
    """A halo for every split spatial dim that needs one; x_operand: position of the input among the operands."""
    weight = tuple(context.global_argument("weight").meta["val"].shape)
    windows = windows_of(call_of(context.node), len(weight) - 2, weight[2:])
    x = context.global_argument("input").meta["val"].shape
    if x_operand == 0:
        produced, layout = context.global_output().shape, context.plan.outputs[0]
    else:
        produced, layout = context.global_argument("grad_output").meta["val"].shape, context.plan.inputs[0]
    return [
        halo_along(
            context,
            f"s{i}",
            (context.plan.inputs[x_operand], 2 + i, x[2 + i]),
            (layout, 2 + i, produced[2 + i]),
            window.rows,
        )
        for i, window in enumerate(windows)
        if window.needs_halo and context.axes_of(frozenset({f"s{i}"}))
    ]


def _on_windows(
    context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any], halos: list[Halo], x_operand: int
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[int, ...]]:
    """(args, kwargs, shape of the input) with the extended input and no padding in the dims of `halos`."""
    x, target = context.argument(args, kwargs, "input"), context.node.target
    shape = context.input_shape(x_operand, tuple(context.global_argument("input").meta["val"].shape))
    padding = list(per_dim(context.global_argument("padding"), len(shape) - 2))
    for halo in halos:
        x, shape = extend(context, x, shape, _dtype(context), halo)
        padding[halo.dim - 2] = 0
    args, kwargs = replace_argument(target, args, kwargs, "input", x)
    args, kwargs = replace_argument(target, args, kwargs, "padding", padding)
    return args, kwargs, shape


def _dtype(context: LocalContext) -> torch.dtype:
    dtype: torch.dtype = context.global_argument("input").meta["val"].dtype
    return dtype


IMPLEMENTATIONS = {"split_convolution": _convolution, "split_convolution_backward": _split_backward}
REWRITES = {
    "aten.convolution.default": _with_local_groups,
    "aten.convolution_backward.default": _convolution_backward,
}
