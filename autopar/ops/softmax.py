"""Softmax of rows of which a rank holds a part: local statistics, an all_reduce each, then the local block.

    m = largest(x, dim); all_reduce max; z = exp_sums(x, m, dim); all_reduce sum; softmax_block(x, m, z, dtype, False)

Statistics keep `dim` with size 1 and are fp32 (fp64 for fp64). A block may be empty.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def largest(x: Tensor, dim: int) -> Tensor:
    """Maximum along `dim`; -inf for an empty block."""
    if x.shape[dim]:
        return _wide(x).amax(dim, keepdim=True)
    shape = [1 if at == dim else size for at, size in enumerate(x.shape)]
    return _wide(x).new_full(shape, -math.inf)


def exp_sums(x: Tensor, maximum: Tensor, dim: int) -> Tensor:
    """Sum of exp(x - maximum) along `dim`."""
    return (_wide(x) - _finite(maximum)).exp().sum(dim, keepdim=True)


def softmax_block(x: Tensor, maximum: Tensor, total: Tensor, dtype: torch.dtype, safe: bool) -> Tensor:
    """exp(x - maximum) / total in `dtype`. safe: a row of -inf gives zeros and not nan."""
    out = (_wide(x) - _finite(maximum)).exp() / total
    return (out.masked_fill(maximum == -math.inf, 0.0) if safe else out).to(dtype)


def log_softmax_block(x: Tensor, maximum: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """x - maximum - log(total) in `dtype`."""
    return (_wide(x) - maximum - total.log()).to(dtype)


def softmax_gradient_sums(grad: Tensor, out: Tensor, dim: int) -> Tensor:
    """Sum of grad * out along `dim`."""
    return (_wide(grad) * _wide(out)).sum(dim, keepdim=True)


def softmax_gradient(grad: Tensor, out: Tensor, sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a block of x from the global sums."""
    return (_wide(out) * (_wide(grad) - sums)).to(dtype)


def log_softmax_gradient_sums(grad: Tensor, dim: int) -> Tensor:
    """Sum of grad along `dim`."""
    return _wide(grad).sum(dim, keepdim=True)


def log_softmax_gradient(grad: Tensor, out: Tensor, sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a block of x from the global sums."""
    return (_wide(grad) - _wide(out).exp() * sums).to(dtype)


def _finite(maximum: Tensor) -> Tensor:
    """0 for a row of -inf, so that its exp(x - maximum) is 0."""
    return maximum.masked_fill(maximum == -math.inf, 0.0)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
