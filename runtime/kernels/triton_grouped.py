"""Products of runs of rows in Triton, for counts that stay on the device.

A program of `product_kernel` takes a tile of rows and of columns. Which run its rows belong to it finds from the counts
alone, all of which it reads: run e has ceil(counts[e] / ROWS) tiles, and the rows behind all runs are a last one, which
gets zeros. So there are at most ceil(T / ROWS) + E + 1 tiles of rows, and programs without one end at once. A program
of `outer_kernel` takes a tile of a run's result and goes through the rows of the run.

The functions have the signatures of the references in `autopar.ops.grouped_products`; operands are read by their
strides, sums are fp32. To Triton a pointer or a number is a `tl.tensor`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILES = {2: (64, 128, 32, 8), 4: (64, 64, 16, 4)}
"""Bytes of an element -> (rows, columns, inner, warps) of a tile: what fits the registers of sm_80, sm_90 and sm_100 at
any strides (benchmarks/results/kernels.json)."""


@triton.jit  # type: ignore[untyped-decorator]
def product_kernel(
    rows: tl.tensor,
    matrices: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    length: tl.tensor,
    inner: tl.tensor,
    columns: tl.tensor,
    groups: tl.tensor,
    row_stride: tl.tensor,
    inner_stride: tl.tensor,
    matrix_group: tl.tensor,
    matrix_inner: tl.tensor,
    matrix_column: tl.tensor,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """ROWS rows of a run times COLUMNS columns of its matrix. length: of all rows; GROUPS: more than `groups`."""
    across = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) // across
    run = tl.arange(0, GROUPS)
    count = tl.load(counts + run, mask=run < groups, other=0)
    count = tl.where(run == groups, length - tl.sum(count, axis=0), count)
    tiles = (count + ROWS - 1) // ROWS
    before = tl.cumsum(tiles, axis=0) <= tile  # runs that end in front of this tile
    group = tl.sum(before.to(tl.int64), axis=0)
    start = tl.sum(tl.where(before, count, 0), axis=0)
    first = start + (tile - tl.sum(tl.where(before, tiles, 0), axis=0)) * ROWS
    stop = start + tl.sum(tl.where(run == group, count, 0), axis=0)
    at = first + tl.arange(0, ROWS)
    here = at < stop
    to = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    source = rows + at[:, None].to(tl.int64) * row_stride
    matrix = matrices + group * matrix_group + to[None, :].to(tl.int64) * matrix_column
    for offset in range(0, tl.where(group < groups, inner, 0), INNER):
        along = offset + tl.arange(0, INNER)
        a = tl.load(source + along[None, :] * inner_stride, mask=here[:, None] & (along[None, :] < inner), other=0.0)
        known = (along[:, None] < inner) & (to[None, :] < columns)
        b = tl.load(matrix + along[:, None].to(tl.int64) * matrix_inner, mask=known, other=0.0)
        total += tl.dot(a, b, input_precision=PRECISION)
    target = out + at[:, None].to(tl.int64) * columns + to[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=here[:, None] & (to[None, :] < columns))


@triton.jit  # type: ignore[untyped-decorator]
def outer_kernel(
    left: tl.tensor,
    right: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    height: tl.tensor,
    columns: tl.tensor,
    left_row: tl.tensor,
    left_column: tl.tensor,
    right_row: tl.tensor,
    right_column: tl.tensor,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """ROWS columns of left by COLUMNS columns of right, over the rows of a run; out (E, height, columns)."""
    across = tl.cdiv(columns, COLUMNS)
    group = tl.program_id(1)
    run = tl.arange(0, GROUPS)
    start = tl.sum(tl.load(counts + run, mask=run < group, other=0), axis=0)
    stop = start + tl.load(counts + group)
    at = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    to = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for offset in range(start, stop, INNER):
        along = offset + tl.arange(0, INNER)
        known = (at[:, None] < height) & (along[None, :] < stop)
        a = tl.load(left + at[:, None] * left_column + along[None, :].to(tl.int64) * left_row, mask=known, other=0.0)
        known = (along[:, None] < stop) & (to[None, :] < columns)
        b = tl.load(right + along[:, None].to(tl.int64) * right_row + to[None, :] * right_column, mask=known, other=0.0)
        total += tl.dot(a, b, input_precision=PRECISION)
    target = out + (group.to(tl.int64) * height + at[:, None]) * columns + to[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(at[:, None] < height) & (to[None, :] < columns))


def grouped_product(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """As `grouped_product_reference`."""
    length, groups, columns = rows.shape[0], matrices.shape[0], matrices.shape[2]
    out = rows.new_empty(length, columns)
    high, wide, *_ = TILES[rows.element_size()]
    tiles = triton.cdiv(length, high) + groups + 1
    product_kernel[(tiles * triton.cdiv(columns, wide),)](
        rows, matrices, counts.contiguous(), out, length, rows.shape[1], columns, groups, *rows.stride(),
        *matrices.stride(), GROUPS=triton.next_power_of_2(groups + 1), **_tile(rows),
    )  # fmt: skip
    return out


def grouped_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """As `grouped_outer_reference`."""
    groups, height, columns = counts.shape[0], left.shape[1], right.shape[1]
    out = left.new_empty(groups, height, columns)
    high, wide, *_ = TILES[left.element_size()]
    outer_kernel[triton.cdiv(height, high) * triton.cdiv(columns, wide), groups](
        left, right, counts.contiguous(), out, height, columns, *left.stride(), *right.stride(),
        GROUPS=triton.next_power_of_2(groups), **_tile(left),
    )  # fmt: skip
    return out


def _tile(x: Tensor) -> dict[str, object]:
    rows, columns, inner, warps = TILES[x.element_size()]
    return {
        "ROWS": rows, "COLUMNS": columns, "INNER": inner, "num_warps": warps,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }  # fmt: skip
