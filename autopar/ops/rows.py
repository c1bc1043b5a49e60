"""Layer norm and RMS norm of rows of which a rank holds a part: sums per row, an all_reduce, then the local block.

    s = row_sums(x, dims); all_reduce; q = row_squares(x, s, dims, count); all_reduce; layer_norm_block(x, ..., s, q)

`dims` are the normalised dims, `count` the global elements of a row. Statistics keep `dims` with size 1 and are fp32
(fp64 for fp64). A block may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def row_sums(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Sum over `dims`."""
    return _wide(x).sum(list(dims), keepdim=True)


def row_squares(x: Tensor, total: Tensor | None, dims: Sequence[int], count: int) -> Tensor:
    """Sum over `dims` of the squares around the mean total / count (around 0 without a total)."""
    centred = _wide(x) if total is None else _wide(x) - total / count
    return (centred * centred).sum(list(dims), keepdim=True)


def layer_norm_block(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, total: Tensor, squares: Tensor, count: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, mean, rstd) of a block of rows with `count` elements each."""
    mean, rstd = total / count, torch.rsqrt(squares / count + eps)
    out = (_wide(x) - mean) * rstd
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.to(x.dtype), mean, rstd


def rms_norm_block(
    x: Tensor, weight: Tensor | None, squares: Tensor, count: int, eps: float | None, rounds: bool
) -> tuple[Tensor, Tensor]:
    """(out, rstd) of a block of rows with `count` elements each. rounds: to the dtype of x also in front of the weight,
    as models write it out; torch's own norm does not."""
    rstd = torch.rsqrt(squares / count + (torch.finfo(x.dtype).eps if eps is None else eps))
    out = _wide(x) * rstd
    out = out.to(x.dtype) if rounds else out
    return (out if weight is None else out * weight).to(x.dtype), rstd


def norm_gradient_sums(
    grad: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, dims: Sequence[int]
) -> Tensor:
    """(2, ...): sums over `dims` of the gradient g of the normalised row and of g * row; (1, ...) of the latter
    without a mean."""
    g, row = _row_gradient(grad, weight), _normalised(x, mean, rstd)
    products = (g * row).sum(list(dims), keepdim=True)
    return products.unsqueeze(0) if mean is None else torch.stack([g.sum(list(dims), keepdim=True), products])


def norm_gradients(
    grad: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    count: int,
    dims: Sequence[int],
    num_vectors: int,
) -> tuple[Tensor, ...]:
    """(gradient of a block of x, of weight[, of bias]) from the global sums of `norm_gradient_sums`.

    num_vectors: 1 for RMS norm, 2 for layer norm; the gradients of the vectors are summed over this block's rows.
    """
    g, row = _row_gradient(grad, weight), _normalised(x, mean, rstd)
    shift = row * (sums[-1] / count)
    shift = shift if mean is None else shift + sums[0] / count
    rows = [dim for dim in range(x.dim()) if dim not in dims]
    kind = x.dtype if weight is None else weight.dtype
    products = _wide(grad) * row
    vectors = [products.sum(rows) if rows else products, _wide(grad).sum(rows) if rows else _wide(grad)]
    return (((g - shift) * rstd).to(x.dtype), *(vector.to(kind) for vector in vectors[:num_vectors]))


def _row_gradient(grad: Tensor, weight: Tensor | None) -> Tensor:
    return _wide(grad) if weight is None else _wide(grad) * weight


def _normalised(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    return (_wide(x) if mean is None else _wide(x) - mean) * rstd


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
