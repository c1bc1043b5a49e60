"""Products in float8: both operands rounded to e4m3 with scales taken from their own values, sums in fp32.

    mm_fp8_rowwise(a, b)      a scale per row of a and per column of b: one large value costs its own row digits
    mm_fp8_tensorwise(a, b)   one scale for each operand

A scale is the largest magnitude that it stands for over 448, the largest number of e4m3, so nothing overflows. The
scales are those of the operands as they are given: on a rank, of the blocks that it holds, which are as fine as the
whole ones or finer. Products run by torch's `_scaled_mm`, on CPUs as on CUDA (sm_89 and newer), which takes dims that
are multiples of 16: others are padded with zeros, which add nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Of a row of zeros."""
MULTIPLE = 16
"""Of which `_scaled_mm` takes the inner and the last dim."""


def quantised_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x in float8, contiguous; fp32 scale of every row (rows, 1)): value times scale is about x (rows, columns)."""
    return _rounded(x, x.abs().amax(dim=1, keepdim=True))


def quantised_tensor_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x in float8, contiguous; the fp32 scale of all of it, 0-dim)."""
    return _rounded(x, x.abs().amax())


def _rounded(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    scale = (largest.float() / LARGEST).clamp_min(SMALLEST_SCALE)
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(DTYPE).contiguous(), scale


quantised_rows = torch.library.custom_op(
    "autopar::quantised_rows", quantised_rows_reference, mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)"
)
quantised_tensor = torch.library.custom_op(
    "autopar::quantised_tensor", quantised_tensor_reference, mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)"
)


@quantised_rows.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=DTYPE), x.new_empty((x.shape[0], 1), dtype=torch.float32)


@quantised_tensor.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=DTYPE), x.new_empty((), dtype=torch.float32)


def _rowwise(a: Tensor, b: Tensor) -> Tensor:
    if not a.numel() or not b.numel():
        return a.new_zeros(a.shape[0], b.shape[1])
    (rows, row_scales), (columns, column_scales) = quantised_rows(a), quantised_rows(b.t())
    return _product(rows, columns, row_scales, column_scales.t(), a.dtype)


def _tensorwise(a: Tensor, b: Tensor) -> Tensor:
    if not a.numel() or not b.numel():
        return a.new_zeros(a.shape[0], b.shape[1])
    (rows, scale), (columns, other) = quantised_tensor(a), quantised_tensor(b.t())
    return _product(rows, columns, scale, other, a.dtype)


def _product(rows: Tensor, columns: Tensor, row_scales: Tensor, column_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """rows (m, k) @ columns (n, k).t() with their scales."""
    inner, wide = -rows.shape[1] % MULTIPLE, -columns.shape[0] % MULTIPLE
    if inner or wide:
        rows, columns = _padded(rows, inner, 0), _padded(columns, inner, wide)
        if column_scales.dim():
            column_scales = functional.pad(column_scales, (0, wide), value=1.0)
    product = torch._scaled_mm(rows, columns.t(), row_scales, column_scales.contiguous(), out_dtype=dtype)
    return product[:, : product.shape[1] - wide].contiguous() if wide else product


def _padded(x: Tensor, columns: int, rows: int) -> Tensor:
    """x (float8) with zeros behind its columns and rows; torch pads bytes, not float8."""
    return functional.pad(x.view(torch.uint8), (0, columns, 0, rows)).view(DTYPE)


mm_fp8_rowwise = torch.library.custom_op(
    "autopar::mm_fp8_rowwise", _rowwise, mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor"
)
mm_fp8_tensorwise = torch.library.custom_op(
    "autopar::mm_fp8_tensorwise", _tensorwise, mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor"
)


@mm_fp8_rowwise.register_fake
@mm_fp8_tensorwise.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])
