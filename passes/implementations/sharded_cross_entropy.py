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
    axes, wide = context.axes_of(frozenset("v")), context.global_output().dtype
    made = context.call(torch.ops.autopar.cross_entropy_rows.default, logits, target, start)
    made = context.describe(made, ((rows,),) * 3, (wide,) * 3)
    maximum, total, picked = (
        context.describe(context.call(operator.getitem, made, item), (rows,), wide) for item in range(3)
    )
    top = context.all_reduce(maximum, axes, "max")
    total = context.describe(context.call(cross_entropy.rescaled_total, total, maximum, top), (rows,), wide)
    total = context.all_reduce(total, axes)
    return context.call(cross_entropy.row_results, picked, target, top, total, start, width)


def _cross_entropy_backward(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    target: Any = context.node.target
    start = context.output_start(0, 1)
    return context.call_operator(*replace_argument(target, args, kwargs, "start", start))


IMPLEMENTATIONS = {"masked_cross_entropy": _cross_entropy, "masked_cross_entropy_backward": _cross_entropy_backward}
