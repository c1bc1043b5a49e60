"""Dropout by global index as one Triton kernel: draw, compare, scale and store in one pass over the block.

    out[r, c] = x[r, c] * keep / (1 - p),  keep = word(first + r * row_stride + c) >= p * 2**32

A program takes BLOCK numbers that begin at a multiple of 4, so that every Philox counter serves its four elements
whatever the alignment of the row; what lies before the row or behind it is masked. Where all rows begin at such
multiples nothing lies before, and rows that follow one another are one. To Triton a pointer or a number is a
`tl.tensor`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.ops.philox import WORD
from autopar.ops.random_index import drop_threshold
from autopar.runtime.kernels.drawn_words import four_words, zeros_in_place

LANES = tl.constexpr(4)
LARGEST_BLOCK = 4096
NUM_WARPS = 8


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
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """x, out: contiguous rows of `columns` elements; mask: bytes; seed: pointer to int64; one program per tile.
    ALIGNED: first and row_stride are multiples of 4."""
    row = tl.program_id(0).to(tl.int64) // tiles
    start = first + row * row_stride
    origin = start // LANES * LANES + tl.program_id(0) % tiles * BLOCK
    column = origin - start + tl.arange(0, BLOCK)
    inside = column < columns
    if ALIGNED:
        column = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
    else:
        inside = inside & (column >= 0)
    at = row * columns + column
    value = tl.load(x + at, mask=inside, other=0.0)
    counters = origin // LANES + tl.arange(0, BLOCK // LANES)
    counters += zeros_in_place(tl.reshape(value, (BLOCK // LANES, 2, 2)))
    one, two, three, four = four_words(counters, salt, tl.load(seed))
    least = tl.cast(threshold, tl.uint32)
    kept = tl.join(tl.join(one >= least, three >= least), tl.join(two >= least, four >= least))
    keep = tl.reshape(kept, (BLOCK,)) & (scale > 0.0)
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
    if row_stride == columns:
        columns, rows = x.numel(), 1
    aligned = first % LANES.value == 0 and (rows == 1 or row_stride % LANES.value == 0)
    numbers = columns if aligned else columns + LANES.value - 1  # that a row touches
    block = max(LANES.value, min(LARGEST_BLOCK, triton.next_power_of_2(numbers)))
    tiles = triton.cdiv(numbers, block)
    dropout_kernel[(rows * tiles,)](
        x,
        out,
        mask.view(torch.int8),
        seed,
        salt,
        min(drop_threshold(p), WORD),
        0.0 if p >= 1.0 else 1.0 / (1.0 - p),
        first,
        row_stride,
        columns,
        tiles,
        ALIGNED=aligned,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )
    return out, mask
