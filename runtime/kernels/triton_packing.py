"""Pack and unpack in Triton: one copy, in which padding and trimming are a mask.

A cut sees a tensor as (outer, position, pieces, run): a run of elements of a piece lies together before and behind the
copy. All sizes are constants, so the divisions of an index become multiplications. The functions have the signatures of
the references in `autopar.ops.packing`. To Triton a pointer or a number is a `tl.tensor`.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def pack_kernel(
    x: tl.tensor,
    out: tl.tensor,
    elements: tl.tensor,
    OUTER: tl.constexpr,
    POSITION: tl.constexpr,
    PIECES: tl.constexpr,
    RUN: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out (pieces, outer, position, run) from x (outer, SPAN): SPAN elements of the cut dim and those behind it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = at % RUN
    block = at // RUN
    piece = block // (OUTER * POSITION)
    outer = block // POSITION % OUTER
    source = (block % POSITION * PIECES + piece) * RUN + within
    inside = at < elements
    value = tl.load(x + outer * SPAN + source, mask=inside & (source < SPAN), other=0.0)
    tl.store(out + at, value, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def unpack_kernel(
    y: tl.tensor,
    out: tl.tensor,
    elements: tl.tensor,
    OUTER: tl.constexpr,
    POSITION: tl.constexpr,
    PIECES: tl.constexpr,
    RUN: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out (outer, SPAN) from y (pieces, outer, position, run); what was padding is never read."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = at % SPAN
    block = within // RUN
    outer = at // SPAN
    source = ((block % PIECES * OUTER + outer) * POSITION + block // PIECES) * RUN + within % RUN
    inside = at < elements
    tl.store(out + at, tl.load(y + source, mask=inside, other=0.0), mask=inside)


def pack(x: Tensor, dim: int, position: int, pieces: int, padded: int) -> Tensor:
    """As `pack_reference`."""
    x = x.contiguous()
    sizes = [*x.shape[:dim], padded // pieces, *x.shape[dim + 1 :]]
    sizes[0] *= pieces
    out = x.new_empty(sizes)
    _copy(pack_kernel, x, out, tuple(x.shape), dim, position, pieces, padded)
    return out


def unpack(y: Tensor, dim: int, position: int, pieces: int, padded: int, size: int) -> Tensor:
    """As `unpack_reference`."""
    first = y.shape[0] // pieces
    shape = (*((first, *y.shape[1:])[:dim]), size, *y.shape[dim + 1 :])
    out = y.new_empty(shape)
    _copy(unpack_kernel, y.contiguous(), out, shape, dim, position, pieces, padded)
    return out


def _copy(
    kernel: triton.JITFunction[[]],
    source: Tensor,
    out: Tensor,
    whole: tuple[int, ...],
    dim: int,
    position: int,
    pieces: int,
    padded: int,
) -> None:
    """whole: the shape that was not packed, without padding."""
    inner = math.prod(whole[dim + 1 :])
    kernel[(triton.cdiv(out.numel(), BLOCK),)](
        source,
        out,
        out.numel(),
        OUTER=math.prod(whole[:dim]),
        POSITION=position,
        PIECES=pieces,
        RUN=padded // (position * pieces) * inner,
        SPAN=whole[dim] * inner,
        BLOCK=BLOCK,
    )
