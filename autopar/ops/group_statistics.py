"""Group norm of which a rank holds a part of every group: local sums, an all_reduce, then the same formulas.

Shapes: x (B, C, ...), statistics (B, G) for G groups; `count` is the global number of elements of a group. Sums are
in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_sums(x: Tensor, num_groups: int) -> Tensor:
    """(B, G): sum of every group of a block."""
    return _grouped(x, num_groups).sum([2, 3])


def group_squares(x: Tensor, total: Tensor, count: int) -> Tensor:
    """(B, G): sum over a block of (x - global mean) squared; `total` is the global sum."""
    return (_grouped(x, total.shape[1]) - _spread(total / count)).square().sum([2, 3])


def normalise_groups(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, total: Tensor, squares: Tensor, count: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, mean, rstd) from the global sum and centred squares."""
    mean, rstd = total / count, torch.rsqrt(squares / count + eps)
    out = ((_grouped(x, total.shape[1]) - _spread(mean)) * _spread(rstd)).reshape(x.shape)
    if weight is not None:
        out = out * _per_channel(weight, x)
    if bias is not None:
        out = out + _per_channel(bias, x)
    return out.to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)


def group_gradient_sums(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
    """(2, B, G): sums over a block of the gradient of the normalised x, and of that times the normalised x."""
    inner = _weighted(grad, weight, mean.shape[1])
    return torch.stack([inner.sum([2, 3]), (inner * _normalised(x, mean, rstd)).sum([2, 3])])


def group_norm_gradients(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    count: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(gradient of a block of x, what the block adds to those of weight and bias); mask: which are wanted."""
    normalised = _normalised(x, mean, rstd)
    inner = _weighted(grad, weight, mean.shape[1])
    centred = inner - _spread(sums[0] / count) - normalised * _spread(sums[1] / count)
    grad_x = (centred * _spread(rstd.to(sums.dtype))).reshape(x.shape).to(x.dtype)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    kind = grad.dtype if weight is None else weight.dtype
    grad_weight = (grad.to(sums.dtype) * normalised.reshape(x.shape)).sum(dims).to(kind)
    grad_bias = grad.to(sums.dtype).sum(dims).to(kind)
    wanted = [part if keep else None for part, keep in zip((grad_x, grad_weight, grad_bias), mask, strict=True)]
    return wanted[0], wanted[1], wanted[2]


def _grouped(x: Tensor, num_groups: int) -> Tensor:
    """(B, G, channels of a group, positions), wide."""
    wide = x if x.dtype == torch.float64 else x.float()
    return wide.reshape(x.shape[0], num_groups, x.shape[1] // num_groups, -1)


def _spread(statistic: Tensor) -> Tensor:
    return statistic[:, :, None, None]


def _normalised(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    grouped = _grouped(x, mean.shape[1])
    return (grouped - _spread(mean.to(grouped.dtype))) * _spread(rstd.to(grouped.dtype))


def _weighted(grad: Tensor, weight: Tensor | None, num_groups: int) -> Tensor:
    return _grouped(grad if weight is None else grad * _per_channel(weight, grad), num_groups)


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    return vector.reshape([1, -1] + [1] * (like.dim() - 2))
