"""Rounding to float8 in Triton: each row by its own scale, or a whole tensor by one.

The functions have the signatures of the references in `autopar.ops.float8`. Operands are read by their strides, so a
transposed view is transposed on the way, as `_scaled_mm` wants its operands. A program reads
whole rows once; where these are too long or lie by columns, it looks for their largest magnitude and then reads them
again, from the cache. Of a whole tensor the first pass ends before the second begins.
To Triton a pointer or a number is a `tl.tensor`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.ops.float8 import DTYPE, LARGEST, SMALLEST_SCALE

ELEMENTS, LEAST_ELEMENTS = 16384, 2048
"""Of a program that takes whole rows: one row of so many at most, or as many as make up the least."""
TURNED = 16, 128
"""Rows and columns of a tile of an operand that lies by columns."""
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
def store_rounded(values: tl.tensor, out: tl.tensor, scale: tl.tensor, at: tl.tensor, to: tl.tensor, rows: tl.tensor,
                  columns: tl.tensor) -> None:  # fmt: skip
    """A tile over its scale as float8, contiguous."""
    scaled = tl.minimum(tl.maximum(values * (1.0 / scale), -TOP), TOP)
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
    WHOLE: tl.constexpr,
) -> None:
    """One program per ROWS rows, each by its own scale. WHOLE: a tile holds whole rows, which are read once."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    to = tl.arange(0, COLUMNS)
    if WHOLE:
        values = tile(x, at, to, rows, columns, row_stride, column_stride)
        scale = tl.maximum(tl.max(tl.abs(values), axis=1) / TOP, LEAST)
        store_rounded(values, out, scale[:, None], at, to, rows, columns)
    else:
        largest = largest_of(x, at, rows, columns, row_stride, column_stride, ROWS, COLUMNS)
        scale = tl.maximum(largest / TOP, LEAST)
        for start in range(0, columns, COLUMNS):
            values = tile(x, at, start + to, rows, columns, row_stride, column_stride)
            store_rounded(values, out, scale[:, None], at, start + to, rows, columns)
    tl.store(scales + at, scale, mask=at < rows)


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
    """ROWS rows by the scale of all, which every program writes; the last rows first, which the cache still holds."""
    at = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    scale = tl.maximum(tl.load(largest) / TOP, LEAST)
    tl.store(scales, scale)
    for start in range(0, columns, COLUMNS):
        to = start + tl.arange(0, COLUMNS)
        values = tile(x, at, to, rows, columns, row_stride, column_stride)
        store_rounded(values, out, scale, at, to, rows, columns)


def tile_of(x: Tensor) -> tuple[int, int]:
    """(rows, columns) of a tile: whole rows up to `ELEMENTS` where these lie in memory, else `TURNED`."""
    if x.stride(1) != 1:
        return TURNED
    columns = min(ELEMENTS, triton.next_power_of_2(x.shape[1]))
    return max(1, min(triton.next_power_of_2(x.shape[0]), LEAST_ELEMENTS // columns)), columns


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantised_rows_reference`."""
    out, scales = _outputs(x, (x.shape[0], 1))
    rows, columns = tile_of(x)
    rows_kernel[(triton.cdiv(x.shape[0], rows),)](
        x, out, scales, *x.shape, *x.stride(), ROWS=rows, COLUMNS=columns, WHOLE=x.shape[1] <= columns,
        num_warps=warps_of(rows, columns),
    )  # fmt: skip
    return out, scales


def quantised_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantised_tensor_reference`."""
    out, scale = _outputs(x, ())
    largest = torch.zeros_like(scale)
    rows, columns = tile_of(x)
    grid, form = (triton.cdiv(x.shape[0], rows),), (*x.shape, *x.stride())
    warps = warps_of(rows, columns)
    largest_kernel[grid](x, largest, *form, ROWS=rows, COLUMNS=columns, num_warps=warps)
    tensor_kernel[grid](x, out, largest, scale, *form, ROWS=rows, COLUMNS=columns, num_warps=warps)
    return out, scale


def warps_of(rows: int, columns: int) -> int:
    """Warps of a program of such a tile: 16 elements a lane."""
    return max(1, min(32, rows * columns // (32 * 16)))


def _outputs(x: Tensor, scales: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(x.shape, dtype=DTYPE, device=x.device),
        torch.empty(scales, dtype=torch.float32, device=x.device),
    )
