"""Two blocks of attention joined in Triton: outputs are read once and written once, by their strides.

The function has the signature of the reference in `autopar.ops.merge_blocks`. To Triton a pointer or a number is a
`tl.tensor`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048
"""Of a program, at most, where a row has no more: 16 a lane (benchmarks/results/kernels.json)."""


@triton.jit  # type: ignore[untyped-decorator]
def merge_kernel(
    out: tl.tensor,
    sums: tl.tensor,
    other: tl.tensor,
    other_sums: tl.tensor,
    result: tl.tensor,
    result_sums: tl.tensor,
    heads: tl.tensor,
    length: tl.tensor,
    width: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    out_row: tl.tensor,
    out_element: tl.tensor,
    other_batch: tl.tensor,
    other_head: tl.tensor,
    other_row: tl.tensor,
    other_element: tl.tensor,
    result_batch: tl.tensor,
    result_head: tl.tensor,
    result_row: tl.tensor,
    result_element: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """ROWS rows of a head of `width` elements; sums: logsumexps (batch, heads, length), contiguous."""
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(length, ROWS)
    batch, head = program // tiles // heads, program // tiles % heads
    row = program % tiles * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    known = row < length
    at = program // tiles * length + row
    one = tl.load(sums + at, mask=known, other=0.0)
    two = tl.load(other_sums + at, mask=known, other=0.0)
    top = tl.maximum(one, two)
    finite = tl.where(top == float("-inf"), 0.0, top)
    share, rest = tl.exp(one - finite), tl.exp(two - finite)
    total = share + rest
    tl.store(result_sums + at, finite + tl.log(total), mask=known)
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    inside = known[:, None] & (column[None, :] < width)
    source = out + batch * out_batch + head * out_head + row[:, None] * out_row
    given = tl.load(source + column[None, :] * out_element, mask=inside, other=0.0)
    source = other + batch * other_batch + head * other_head + row[:, None] * other_row
    added = tl.load(source + column[None, :] * other_element, mask=inside, other=0.0).to(tl.float32)
    found = given.to(tl.float32) * (share * inverse)[:, None] + added * (rest * inverse)[:, None]
    target = result + batch * result_batch + head * result_head + row[:, None] * result_row
    tl.store(target + column[None, :] * result_element, found.to(given.dtype), mask=inside)


def merge_blocks(out: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """As `merge_blocks_reference`."""
    result, sums = torch.empty_like(out), logsumexp.new_empty(logsumexp.shape)
    batch, heads, length, width = out.shape
    block = triton.next_power_of_2(width)
    rows = min(triton.next_power_of_2(length), max(1, ELEMENTS // block))
    merge_kernel[(batch * heads * triton.cdiv(length, rows),)](
        out,
        logsumexp.contiguous(),
        other,
        other_logsumexp.contiguous(),
        result,
        sums,
        heads,
        length,
        width,
        *out.stride(),
        *other.stride(),
        *result.stride(),
        ROWS=rows,
        BLOCK=block,
    )
    return result, sums
