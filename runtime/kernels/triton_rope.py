"""Rotary position embedding in Triton: a program takes some heads of one token, whose angles it reads once.

The functions have the signatures of the references in `autopar.ops.rope`. Heads are read and written by their strides.
To Triton a pointer or a number is a `tl.tensor`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = 1024
"""Of a program, at most, where a head has no more: 8 a lane (benchmarks/results/kernels.json)."""


@triton.jit  # type: ignore[untyped-decorator]
def rope_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    length: tl.tensor,
    pairs: tl.tensor,
    table_batch: tl.tensor,
    x_batch: tl.tensor,
    x_head: tl.tensor,
    x_row: tl.tensor,
    x_element: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    out_row: tl.tensor,
    out_element: tl.tensor,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """HEADS heads of a token, of `pairs` pairs each; table_batch: elements of a batch of cos and sin."""
    token = tl.program_id(0).to(tl.int64)
    batch, row = token // length, token % length
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, BLOCK)
    first, second = lane, lane + pairs
    if INTERLEAVED:
        first, second = 2 * lane, 2 * lane + 1
    known = lane < pairs
    table = batch * table_batch + row * 2 * pairs
    cos_first = tl.load(cos + table + first, mask=known, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos + table + second, mask=known, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin + table + first, mask=known, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin + table + second, mask=known, other=0.0).to(tl.float32)[None, :]
    inside = (head[:, None] < heads) & known[None, :]
    source = x + batch * x_batch + row * x_row + head[:, None] * x_head
    given = tl.load(source + first[None, :] * x_element, mask=inside, other=0.0)
    other = tl.load(source + second[None, :] * x_element, mask=inside, other=0.0)
    one, two = given.to(tl.float32), other.to(tl.float32)
    if BACKWARD:
        found = one * cos_first + two * sin_second
        partner = two * cos_second - one * sin_first
    else:
        found = one * cos_first - two * sin_first
        partner = two * cos_second + one * sin_second
    target = out + batch * out_batch + row * out_row + head[:, None] * out_head
    tl.store(target + first[None, :] * out_element, found.to(given.dtype), mask=inside)
    tl.store(target + second[None, :] * out_element, partner.to(given.dtype), mask=inside)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """As `rope_reference`."""
    return _turned(x, cos, sin, interleaved, backward=False)


def rope_backward(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """As `rope_backward_reference`."""
    return _turned(grad, cos, sin, interleaved, backward=True)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, backward: bool) -> Tensor:
    out = torch.empty_like(x)
    batch, heads, length, width = x.shape
    block = triton.next_power_of_2(width // 2)
    together = min(triton.next_power_of_2(heads), max(1, PAIRS // block))
    rope_kernel[(batch * length, triton.cdiv(heads, together))](
        x,
        cos.contiguous(),
        sin.contiguous(),
        out,
        heads,
        length,
        width // 2,
        length * width if cos.shape[0] > 1 else 0,
        *x.stride(),
        *out.stride(),
        INTERLEAVED=interleaved,
        BACKWARD=backward,
        HEADS=together,
        BLOCK=block,
    )
    return out
