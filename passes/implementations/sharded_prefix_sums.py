"""Running sums and linear recurrences along a split dim: one all_reduce of what every block passes on.

Of a sum a block passes on a number per row, of a recurrence a factor and a state.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.ops import linear_recurrence, prefix_sums
from autopar.passes.implementations.local_context import LocalContext


def _prefix_sum(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    out = context.global_output()
    dim = context.global_argument("dim") % out.dim()
    reverse = context.node.target is torch.ops.autopar.reverse_cumsum.default
    axes, position, num_blocks = _blocks(context, dim, reverse)
    wide = torch.float32 if out.dtype in (torch.float16, torch.bfloat16) else out.dtype
    shape = tuple(1 if at == dim else size for at, size in enumerate(context.output_shape()))
    total = context.describe(context.call(prefix_sums.block_total, args[0], dim, wide), shape, wide)
    slots = context.call(prefix_sums.after_block, total, position, num_blocks)
    before = context.all_reduce(context.describe(slots, (num_blocks, *shape), wide), axes)
    return context.call(prefix_sums.continued_sum, args[0], dim, before, position, out.dtype, reverse)


def _prefix_recurrence(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    out = context.global_output()
    dim, reverse = context.global_argument("dim") % out.dim(), context.global_argument("reverse")
    axes, position, num_blocks = _blocks(context, dim, reverse)
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    local = context.output_shape()
    both = context.call(linear_recurrence.block_recurrence, args[0], args[1], dim, reverse)
    context.describe(both, (local, local), (wide, wide))
    parts = [context.describe(context.call(operator.getitem, both, i), local, wide) for i in range(2)]
    passed = context.call(linear_recurrence.last_of_block, *parts, dim, position, num_blocks, reverse)
    shape = (num_blocks, 2, *local[:dim], *local[dim + 1 :])
    passed = context.all_reduce(context.describe(passed, shape, wide), axes)
    return context.call(linear_recurrence.carried_on, *parts, dim, passed, position, out.dtype)


def _blocks(context: LocalContext, dim: int, reverse: bool) -> tuple[tuple[int, ...], int, int]:
    """(axes that split a dim, which of its blocks this rank has, counted from where the sum begins, how many)."""
    axes = context.axes_of(frozenset({f"d{dim}"}))
    position, num_blocks = 0, 1
    for axis in axes:
        position = position * context.mesh.shape[axis] + context.coordinate[axis]
        num_blocks *= context.mesh.shape[axis]
    return axes, num_blocks - 1 - position if reverse else position, num_blocks


IMPLEMENTATIONS = {"prefix_sum": _prefix_sum, "prefix_recurrence": _prefix_recurrence}
