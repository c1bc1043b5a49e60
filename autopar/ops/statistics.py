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
    return (x - per_channel(total / count, x)).square_().sum([dim for dim in range(x.dim()) if dim != 1])


def channel_sums(x: Tensor) -> Tensor:
    """(C,): sum of x over all dims but 1, in fp32 (fp64 for fp64)."""
    return x.sum([dim for dim in range(x.dim()) if dim != 1], dtype=_wide_dtype(x))


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
    out = _normalised(x, mean, invstd)
    if weight is not None:
        out.mul_(per_channel(weight, x))
    if bias is not None:
        out.add_(per_channel(bias, x))
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
    products = _normalised(x, mean, invstd).mul_(grad)
    return torch.stack([grad.sum(dims, dtype=_wide_dtype(grad)), products.sum(dims)])


def batch_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, sums: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of a block of x, of weight, of bias) from the global sums of `batch_norm_gradient_sums`."""
    centred = grad - per_channel(sums[0] / count, x)
    centred -= _normalised(x, mean, invstd).mul_(per_channel(sums[1] / count, x))
    scale = invstd if weight is None else invstd * weight
    kind = grad.dtype if weight is None else weight.dtype
    return centred.mul_(per_channel(scale, x)).to(x.dtype), sums[1].to(kind), sums[0].to(kind)


def _normalised(x: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """A value of its own, as wide as the statistics."""
    return (x - per_channel(mean, x)).mul_(per_channel(invstd, x))


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
