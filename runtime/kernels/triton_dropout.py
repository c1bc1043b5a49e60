"""Dropout by global index as one Triton kernel: draw, compare, scale and store in one pass over the block.

    out[r, c] = x[r, c] * keep / (1 - p),  keep = word(first + r * row_stride + c) >= p * 2**32

A program takes BLOCK numbers that begin at a multiple of 4, so that every Philox counter serves its four elements
whatever the alignment of the row; what lies before the row or behind it is masked. To Triton a pointer or
a number is a `tl.tensor`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.ops.random_index import drop_threshold

LANES = tl.constexpr(4)
LARGEST_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def words_of_tile(counters: tl.tensor, salt: tl.tensor, seed: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """BLOCK words, four of each counter, in the order of the numbers."""
    low = (counters & 0xFFFFFFFF).to(tl.uint32)
    high = (counters >> 32).to(tl.uint32)
    zero = counters * 0
    first, second, third, fourth = tl.philox(seed, low, high, (zero + salt).to(tl.uint32), zero.to(tl.uint32))
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (BLOCK,))


@triton.jit  # type: ignore[untyped-decorator]
def dropout_kernel(
    x: tl.tensor,
    out: tl.tensor,
    mask: tl.tensor,
    seed: tl.tensor,
    salt: tl.tensor,
    threshold: tl.tensor,
    scale: tl.tensor,
    first: tl.tensor,
    row_stride: tl.tensor,
    columns: tl.tensor,
    tiles: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """x, out: contiguous rows of `columns` elements; mask: bytes; seed: pointer to int64; one program per tile."""
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    tile = program % tiles
    start = first + row * row_stride
    origin = start // LANES * LANES + tile * BLOCK
    counters = origin // LANES + tl.arange(0, BLOCK // LANES)
    words = words_of_tile(counters, salt, tl.load(seed), BLOCK)
    column = origin - start + tl.arange(0, BLOCK)
    inside = (column >= 0) & (column < columns)
    at = row * columns + column
    keep = words.to(tl.int64) >= threshold
    value = tl.load(x + at, mask=inside, other=0.0)
    scaled = value.to(tl.float32) * keep.to(tl.float32) * scale
    tl.store(out + at, scaled.to(value.dtype), mask=inside)
    tl.store(mask + at, keep.to(tl.int8), mask=inside)


def dropout_rows(
    x: Tensor, p: float, seed: Tensor, salt: int, first: int, row_stride: int, rows: int
) -> tuple[Tensor, Tensor]:
    """(output, bool mask) as `autopar.ops.dropout_operator.dropout_rows_reference`; fp64 values are scaled in fp32."""
    x = x.contiguous()
    out, mask = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    if x.numel() == 0:
        return out, mask
    columns = x.numel() // rows
    block = min(LARGEST_BLOCK, triton.next_power_of_2(columns + LANES.value - 1))
    tiles = triton.cdiv(columns + LANES.value - 1, block)
    scale = 0.0 if p >= 1.0 else 1.0 / (1.0 - p)
    dropout_kernel[(rows * tiles,)](
        x,
        out,
        mask.view(torch.int8),
        seed,
        salt,
        drop_threshold(p),
        scale,
        first,
        row_stride,
        columns,
        tiles,
        BLOCK=block,
    )
    return out, mask
