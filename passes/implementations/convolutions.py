"""Convolutions on blocks: the number of groups is local, and a bias is added once when input channels are split."""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.ops.blocks import added_once
from autopar.passes.local_context import LocalContext, replace_argument


def _first_rank_bias(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Input channels are split: the outputs are summed, so only one coordinate adds the bias."""
    first = not any(context.coordinate[axis] for axis in context.axes_of(frozenset({"ci"})))
    bias = context.call(added_once, context.argument(args, kwargs, "bias"), first)
    args, kwargs = replace_argument(context.node.target, args, kwargs, "bias", bias)
    return _with_local_groups(context, args, kwargs)


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


IMPLEMENTATIONS = {"first_rank_bias": _first_rank_bias}
REWRITES = {
    "aten.convolution.default": _with_local_groups,
    "aten.convolution_backward.default": _convolution_backward,
}
