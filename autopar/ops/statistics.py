"""Reductions and normalisations of which a rank holds a part: each gives what its rank adds to the whole.

mean over a split dim     sum of the block / global count, so that the sum over the ranks is the mean (uneven, too)
batch norm, batch split   local sums, an all_reduce, then the same normalisation everywhere
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def local_mean(block: Tensor, dims: Sequence[int], keepdim: bool, count: int, dtype: torch.dtype | None) -> Tensor:
    """Sum over `dims` of a block divided by the global `count` of elements."""
    return block.sum(list(dims), keepdim=keepdim, dtype=dtype) / count


def centred_squares(x: Tensor, total: Tensor, count: int) -> Tensor:
    """(C,): sum over a block of (x - global mean) squared; `total` (C,) is the global sum."""
    difference = _wide(x) - per_channel(total / count, x)
    return (difference * difference).sum([dim for dim in range(x.dim()) if dim != 1])


def channel_sums(x: Tensor) -> Tensor:
    """(C,): sum of x over all dims but 1, in fp32 (fp64 for fp64)."""
    return _wide(x).sum([dim for dim in range(x.dim()) if dim != 1])


def per_channel(statistic: Tensor, like: Tensor) -> Tensor:
    """(C,) shaped to broadcast along dim 1 of `like`."""
    return statistic.reshape([1, -1] + [1] * (like.dim() - 2))


def normalise_batch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    total: Tensor,
    squares: Tensor,
    count: int,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """(out, mean, invstd[, new running mean, new running variance]) from the global sum and centred squares."""
    mean, variance = total / count, squares / count
    invstd = torch.rsqrt(variance + eps)
    out = (_wide(x) - per_channel(mean, x)) * per_channel(invstd, x)
    if weight is not None:
        out = out * per_channel(weight, x)
    if bias is not None:
        out = out + per_channel(bias, x)
    results: list[Tensor] = [out.to(x.dtype), mean, invstd]
    if running_mean is not None and running_var is not None:
        unbiased = squares / (count - 1)
        results.append(running_mean + momentum * (mean - running_mean))
        results.append(running_var + momentum * (unbiased - running_var))
    return tuple(results)


def batch_norm_gradient_sums(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """(2, C): sums over a block of grad and of grad * normalised x; their global sums are the gradients of bias and
    weight."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    normalised = (_wide(x) - per_channel(mean, x)) * per_channel(invstd, x)
    return torch.stack([_wide(grad).sum(dims), (_wide(grad) * normalised).sum(dims)])


def batch_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, sums: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of a block of x, of weight, of bias) from the global sums of `batch_norm_gradient_sums`."""
    normalised = (_wide(x) - per_channel(mean, x)) * per_channel(invstd, x)
    centred = _wide(grad) - per_channel(sums[0] / count, x) - normalised * per_channel(sums[1] / count, x)
    scale = invstd if weight is None else invstd * weight
    kind = grad.dtype if weight is None else weight.dtype
    return (centred * per_channel(scale, x)).to(x.dtype), sums[1].to(kind), sums[0].to(kind)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
