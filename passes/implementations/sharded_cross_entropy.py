"""Cross-entropy of ours on a rank that holds a block of the vocabulary.

    cross_entropy(logits, target)  -->  maximum, total, picked = cross_entropy_rows(logits, target, start)
                                        two all_reduces of one number per row
                                        row_results(picked, target, top, total, start, width)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.ops import cross_entropy
from autopar.passes.implementations.local_context import LocalContext, replace_argument


def _cross_entropy(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    logits, target = args
    whole = tuple(context.global_argument("logits").meta["val"].shape)
    (rows, width), start = context.input_shape(0, whole), context.input_start(0, 1, whole[1])
    made = context.call(torch.ops.autopar.cross_entropy_rows.default, logits, target, start)
    top, total, picked = _of_all_blocks(context, made, rows)
    return context.call(cross_entropy.row_results, picked, target, top, total, start, width)


def _linear_cross_entropy(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    hidden, weight, target, _ = args
    rows, _ = context.input_shape(0, tuple(context.global_argument("hidden").meta["val"].shape))
    start = _start_of_weight(context)
    made = context.call(torch.ops.autopar.linear_cross_entropy.default, hidden, weight, target, start)
    top, total, picked = _of_all_blocks(context, made, rows)
    picked = context.all_reduce(picked, context.axes_of(frozenset("v")))
    return context.call(cross_entropy.row_statistics, top, total, picked)


def _of_all_blocks(context: LocalContext, made: fx.Node, rows: int) -> tuple[fx.Node, fx.Node, fx.Node]:
    """(maximum, sum of exp(logit - maximum)) of all blocks of the vocabulary, and what this block picks."""
    axes, wide = context.axes_of(frozenset("v")), context.global_output().dtype
    made = context.describe(made, ((rows,),) * 3, (wide,) * 3)
    maximum, total, picked = (
        context.describe(context.call(operator.getitem, made, item), (rows,), wide) for item in range(3)
    )
    top = context.all_reduce(maximum, axes, "max")
    total = context.describe(context.call(cross_entropy.rescaled_total, total, maximum, top), (rows,), wide)
    return top, context.all_reduce(total, axes), picked


def _start_of_weight(context: LocalContext) -> int:
    return context.input_start(1, 0, int(context.global_argument("weight").meta["val"].shape[0]))


def _cross_entropy_backward(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    return _from(context, context.output_start(0, 1), args, kwargs)


def _linear_cross_entropy_backward(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    return _from(context, _start_of_weight(context), args, kwargs)


def _from(context: LocalContext, start: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The operator with the first index of this block of the vocabulary."""
    target: Any = context.node.target
    return context.call_operator(*replace_argument(target, args, kwargs, "start", start))


IMPLEMENTATIONS = {
    "masked_cross_entropy": _cross_entropy,
    "masked_cross_entropy_backward": _cross_entropy_backward,
    "masked_linear_cross_entropy": _linear_cross_entropy,
    "masked_linear_cross_entropy_backward": _linear_cross_entropy_backward,
}
