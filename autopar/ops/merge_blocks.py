"""Attention over two blocks of keys joined to that over both, as one operator.

    logsumexp = log(exp(logsumexp_1) + exp(logsumexp_2))
    out = out_1 exp(logsumexp_1 - logsumexp) + out_2 exp(logsumexp_2 - logsumexp)

A row that sees nothing of a block has a logsumexp of -inf there and takes nothing from it; one that sees nothing at all
is zero. The body is the reference, computed in the dtype of logsumexp and rounded once at the end. Sources:
RingAttention (arXiv 2310.01889), the split softmax of FlashAttention (arXiv 2205.14135).

out (B, H, S, E) of any strides, which the result has, too; logsumexp (B, H, S) in fp32 (fp64 for fp64). Whoever joins
many blocks keeps `out` in the dtype of logsumexp until the last: only `other` may be narrower.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge_blocks_reference(
    out: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor
) -> tuple[Tensor, Tensor]:
    """(out over both blocks, of the shape, strides and dtype of `out`; its logsumexp, contiguous)."""
    joined = torch.logaddexp(logsumexp, other_logsumexp)
    finite = joined.masked_fill(joined == -math.inf, 0.0)
    share, rest = ((sums - finite).exp().unsqueeze(-1) for sums in (logsumexp, other_logsumexp))
    total = torch.mul(out, share, out=torch.empty_like(out, dtype=joined.dtype))
    total.addcmul_(other.to(joined.dtype), rest)
    return total.to(out.dtype), joined.contiguous()


merge_blocks = torch.library.custom_op(
    "autopar::merge_blocks",
    merge_blocks_reference,
    mutates_args=(),
    schema="(Tensor out, Tensor logsumexp, Tensor other, Tensor other_logsumexp) -> (Tensor, Tensor)",
)


@merge_blocks.register_fake
def _(out: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out), logsumexp.new_empty(logsumexp.shape)
