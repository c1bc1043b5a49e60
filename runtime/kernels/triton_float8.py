"""Rounding to float8 in Triton: each row by its own scale, or a whole tensor by one.

The functions have the signatures of the references in `autopar.ops.float8`. Operands are read by their strides, so a
transposed view is transposed on the way, as `_scaled_mm` wants its operands. A program looks for the largest magnitude
of its rows and then reads them again, from the cache; of a whole tensor the first pass ends before the second begins.
To Triton a pointer or a number is a `tl.tensor`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.ops.float8 import DTYPE, LARGEST, SMALLEST_SCALE

ROWS, COLUMNS = 16, 128
"""Of a tile: what a program holds at a time."""
TOP = tl.constexpr(LARGEST)
LEAST = tl.constexpr(SMALLEST_SCALE)


@triton.jit  # type: ignore[untyped-decorator]
def tile(x: tl.tensor, at: tl.tensor, to: tl.tensor, rows: tl.tensor, columns: tl.tensor, row_stride: tl.tensor,
         column_stride: tl.tensor) -> tl.tensor:  # fmt: skip
    """The elements at rows `at` and columns `to` in fp32, 0 where there are none."""
    inside = (at[:, None] < rows) & (to[None, :] < columns)
    return tl.load(x + at[:, None] * row_stride + to[None, :] * column_stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def largest_of(x: tl.tensor, at: tl.tensor, rows: tl.tensor, columns: tl.tensor, row_stride: tl.tensor,
               column_stride: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:  # fmt: skip
    """The largest magnitude of each of the rows `at`."""
    found = tl.zeros((ROWS,), tl.float32)
    for start in range(0, columns, COLUMNS):
        values = tile(x, at, start + tl.arange(0, COLUMNS), rows, columns, row_stride, column_stride)
        found = tl.maximum(found, tl.max(tl.abs(values), axis=1))
    return found


@triton.jit  # type: ignore[untyped-decorator]
def store_rounded(x: tl.tensor, out: tl.tensor, scale: tl.tensor, at: tl.tensor, rows: tl.tensor, columns: tl.tensor,
                  row_stride: tl.tensor, column_stride: tl.tensor, COLUMNS: tl.constexpr) -> None:  # fmt: skip
    """The rows `at` over their scale as float8, contiguous."""
    for start in range(0, columns, COLUMNS):
        to = start + tl.arange(0, COLUMNS)
        values = tile(x, at, to, rows, columns, row_stride, column_stride)
        scaled = tl.minimum(tl.maximum(values / scale, -TOP), TOP)
        inside = (at[:, None] < rows) & (to[None, :] < columns)
        tl.store(out + at[:, None] * columns + to[None, :], scaled.to(tl.float8e4nv), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def rows_kernel(
    x: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program per ROWS rows, each by its own scale."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    largest = largest_of(x, at, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
    scale = tl.maximum(largest / TOP, LEAST)
    tl.store(scales + at, scale, mask=at < rows)
    store_rounded(x, out, scale[:, None], at, rows, columns, row_stride, column_stride, COLUMNS)


@triton.jit  # type: ignore[untyped-decorator]
def largest_kernel(
    x: tl.tensor,
    largest: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """The largest magnitude of ROWS rows into the one of all."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    found = largest_of(x, at, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
    tl.atomic_max(largest, tl.max(found, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def tensor_kernel(
    x: tl.tensor,
    out: tl.tensor,
    largest: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """ROWS rows by the scale of all, which every program writes."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    scale = tl.maximum(tl.load(largest) / TOP, LEAST)
    tl.store(scales, scale)
    store_rounded(x, out, scale, at, rows, columns, row_stride, column_stride, COLUMNS)


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantised_rows_reference`."""
    out, scales = _outputs(x, (x.shape[0], 1))
    rows_kernel[(triton.cdiv(x.shape[0], ROWS),)](x, out, scales, *x.shape, *x.stride(), ROWS=ROWS, COLUMNS=COLUMNS)
    return out, scales


def quantised_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantised_tensor_reference`."""
    out, scale = _outputs(x, ())
    largest = torch.zeros_like(scale)
    grid, form = (triton.cdiv(x.shape[0], ROWS),), (*x.shape, *x.stride())
    largest_kernel[grid](x, largest, *form, ROWS=ROWS, COLUMNS=COLUMNS)
    tensor_kernel[grid](x, out, largest, scale, *form, ROWS=ROWS, COLUMNS=COLUMNS)
    return out, scale


def _outputs(x: Tensor, scales: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(x.shape, dtype=DTYPE, device=x.device),
        torch.empty(scales, dtype=torch.float32, device=x.device),
    )
