"""Running sums along a dim that is split: the sums of a block, plus the totals of all blocks before it.

    t = block_total(x, 0, dtype); s = after_block(t, position, num_blocks); all_reduce; continued_sum(x, 0, s, position)

`position` counts the blocks of the dim in order. A rank adds its total to the slots of the blocks behind it, so that
after the all_reduce a slot holds what stands before its block. A sum from the end (`reverse_cumsum`, the gradient of a
running sum) counts them from there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def block_total(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Sum of a block along `dim`, which keeps size 1."""
    return x.sum(dim, keepdim=True, dtype=dtype)


def after_block(total: Tensor, position: int, num_blocks: int) -> Tensor:
    """(num_blocks, ...): the total in the slots of later blocks, zeros in the others."""
    slots = torch.arange(num_blocks, device=total.device).view(-1, *[1] * total.dim())
    return torch.where(slots > position, total, torch.zeros_like(total))


def continued_sum(
    x: Tensor, dim: int, before: Tensor, position: int, dtype: torch.dtype, reverse: bool = False
) -> Tensor:
    """Running sums of a block along `dim` in `dtype`, from what stands before it: `before[position]`."""
    wide = x.to(before.dtype)
    sums = _from_the_end(wide, dim) if reverse else wide.cumsum(dim)
    return (sums + before[position]).to(dtype)


def _from_the_end(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).cumsum(dim).flip(dim)


reverse_cumsum = torch.library.custom_op(
    "autopar::reverse_cumsum", _from_the_end, mutates_args=(), schema="(Tensor self, int dim) -> Tensor"
)
"""Sums of what stands at a place of `dim` and behind it, of a tensor of floats."""


@reverse_cumsum.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
