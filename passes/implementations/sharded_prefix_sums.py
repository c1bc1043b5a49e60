"""Running sums along a split dim: one all_reduce of a number per row and block."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ops import prefix_sums
from autopar.passes.implementations.local_context import LocalContext


def _prefix_sum(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    out = context.global_output()
    dim = context.global_argument("dim") % out.dim()
    axes = context.axes_of(frozenset({f"d{dim}"}))
    position, num_blocks = 0, 1
    for axis in axes:
        position = position * context.mesh.shape[axis] + context.coordinate[axis]
        num_blocks *= context.mesh.shape[axis]
    reverse = context.node.target is torch.ops.autopar.reverse_cumsum.default
    position = num_blocks - 1 - position if reverse else position
    wide = torch.float32 if out.dtype in (torch.float16, torch.bfloat16) else out.dtype
    shape = tuple(1 if at == dim else size for at, size in enumerate(context.output_shape()))
    total = context.describe(context.call(prefix_sums.block_total, args[0], dim, wide), shape, wide)
    slots = context.call(prefix_sums.after_block, total, position, num_blocks)
    before = context.all_reduce(context.describe(slots, (num_blocks, *shape), wide), axes)
    return context.call(prefix_sums.continued_sum, args[0], dim, before, position, out.dtype, reverse)


IMPLEMENTATIONS = {"prefix_sum": _prefix_sum}
