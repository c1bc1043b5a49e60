"""Reductions of which a rank holds a part of the reduced dims: what it adds, and the result from the global values.

All statistics keep the reduced dims with size 1; `count` is the global number of elements that are reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sums(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Sum of a block."""
    return x.sum(list(dims), keepdim=True)


def squares(x: Tensor, dims: Sequence[int], total: Tensor, count: int) -> Tensor:
    """Sum of (x - global mean) squared over a block; `total` is the global sum."""
    return (x - total / count).square().sum(list(dims), keepdim=True)


def variance(total: Tensor, centred: Tensor, count: int, correction: float, dims: Sequence[int]) -> Tensor:
    """Variance from the global centred squares, without `dims` (none to keep them)."""
    return (centred / max(count - correction, 0)).squeeze(list(dims))


def deviation(total: Tensor, centred: Tensor, count: int, correction: float, dims: Sequence[int]) -> Tensor:
    """Square root of `variance`."""
    return variance(total, centred, count, correction, dims).sqrt()


def variance_and_mean(
    total: Tensor, centred: Tensor, count: int, correction: float, dims: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(`variance`, mean)."""
    return variance(total, centred, count, correction, dims), (total / count).squeeze(list(dims))


def largest(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Maximum of a block."""
    return x.amax(list(dims), keepdim=True)


def exponentials(x: Tensor, dims: Sequence[int], top: Tensor) -> Tensor:
    """Sum over a block of exp(x - top); an infinite top counts as 0."""
    return (x - _finite(top)).exp().sum(list(dims), keepdim=True)


def logarithm(total: Tensor, top: Tensor, dims: Sequence[int]) -> Tensor:
    """log(total) + top, without `dims`."""
    return (total.log() + _finite(top)).squeeze(list(dims))


def power(x: Tensor, dims: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Sum of squares of a block."""
    return x.to(dtype).abs().square().sum(list(dims), keepdim=True)


def root(total: Tensor, dims: Sequence[int]) -> Tensor:
    """Square root of the global sum of squares, without `dims`."""
    return total.sqrt().squeeze(list(dims))


def _finite(top: Tensor) -> Tensor:
    return torch.where(top.isfinite(), top, torch.zeros_like(top))
