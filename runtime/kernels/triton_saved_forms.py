"""Saved values in less room, and back: one pass over a block each.

    round_kernel      groups of 256 values -> codes of 8, 4 or 2 bits by chance, least value and step
    unround_kernel    the values again
    pack_kernel       8 values -> a byte of their signs
    unpack_kernel     0 and 1 again

A program rounds GROUPS groups that lie in its registers: their range, their words (`drawn_words.py`) and their codes
are found without a second look at memory. Where rows begin at multiples of 4, a Philox counter serves the four values
that share it; else each value draws the four and takes its own. What is computed is what `autopar.ops.saved_forms`
computes, in fp32. To Triton a pointer or a number is a `tl.tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.ops import saved_forms
from autopar.ops.random_index import as_rows
from autopar.runtime.kernels.drawn_words import four_words

GROUP = tl.constexpr(saved_forms.GROUP)
LANES = tl.constexpr(4)
CHANCE = tl.constexpr(2.0**-saved_forms.FRACTION_BITS)
DROPPED_BITS = tl.constexpr(32 - saved_forms.FRACTION_BITS)
GROUPS = 8
"""Of a program."""
BLOCK = 2048
"""Values of a program that has no groups."""


@triton.jit  # type: ignore[untyped-decorator]
def round_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    ranges: tl.tensor,
    seed: tl.tensor,
    salt: tl.tensor,
    first: tl.tensor,
    row_stride: tl.tensor,
    columns: tl.tensor,
    count: tl.tensor,
    groups: tl.tensor,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """x: contiguous; codes: bytes; ranges: (groups, 2) fp32; seed: pointer to int64."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    start = group[:, None] * GROUP
    at = tl.minimum(start + tl.arange(0, GROUP)[None, :], count - 1)
    value = tl.load(x + at).to(tl.float32)
    low, high = tl.min(value, 1), tl.max(value, 1)
    step = (high - low) / (2**BITS - 1)
    inverse = tl.where(step > 0.0, 1.0 / step, 0.0)
    key = tl.load(seed)
    if ALIGNED:
        here = start + LANES * tl.arange(0, GROUP // LANES)[None, :]
        one, two, three, four = four_words((first + here // columns * row_stride + here % columns) // LANES, salt, key)
        words = tl.reshape(tl.join(tl.join(one, three), tl.join(two, four)), (GROUPS, GROUP))
    else:
        number = first + at // columns * row_stride + at % columns
        one, two, three, four = four_words(number // LANES, salt, key)
        lane = number % LANES
        words = tl.where(lane < 2, tl.where(lane == 0, one, two), tl.where(lane == 2, three, four))
    chance = (words >> DROPPED_BITS).to(tl.float32) * CHANCE
    code = tl.floor((value - low[:, None]) * inverse[:, None] + chance)
    is_value = start + tl.arange(0, GROUP)[None, :] < count
    code = tl.where(is_value, tl.minimum(tl.maximum(code, 0.0), 2.0**BITS - 1.0), 0.0).to(tl.int32)
    if BITS == 8:
        byte = code
    elif BITS == 4:
        one_code, two_code = tl.split(tl.reshape(code, (GROUPS, GROUP // 2, 2)))
        byte = one_code | two_code << 4
    else:
        even, odd = tl.split(tl.reshape(code, (GROUPS, GROUP // 4, 2, 2)))
        one_code, three_code = tl.split(even)
        two_code, four_code = tl.split(odd)
        byte = one_code | two_code << 2 | three_code << 4 | four_code << 6
    each: tl.constexpr = GROUP * BITS // 8
    is_one = group < groups
    place = group[:, None] * each + tl.arange(0, each)[None, :]
    tl.store(codes + place, byte.to(tl.uint8), mask=is_one[:, None])
    tl.store(ranges + 2 * group, low, mask=is_one)
    tl.store(ranges + 2 * group + 1, step, mask=is_one)


@triton.jit  # type: ignore[untyped-decorator]
def unround_kernel(
    codes: tl.tensor,
    ranges: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out: contiguous. Neighbours that share a byte read it once from memory."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    group = at // GROUP
    low = tl.load(ranges + 2 * group, mask=inside, other=0.0)
    step = tl.load(ranges + 2 * group + 1, mask=inside, other=0.0)
    byte = tl.load(codes + at * BITS // 8, mask=inside, other=0).to(tl.int32)
    code = byte >> (at % (8 // BITS) * BITS).to(tl.int32) & 2**BITS - 1
    tl.store(out + at, (low + code.to(tl.float32) * step).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def pack_kernel(x: tl.tensor, out: tl.tensor, count: tl.tensor, bytes_: tl.tensor, BLOCK: tl.constexpr) -> None:
    """x: contiguous numbers, or bools as int8, of which none is below 0."""
    byte = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    bit = tl.arange(0, 8)[None, :]
    at = byte[:, None] * 8 + bit
    value = tl.load(x + at, mask=at < count, other=0)
    flags = tl.where(value <= 0, 0, 1)  # NaN is no number at or below 0
    tl.store(out + byte, tl.sum(flags << bit, 1).to(tl.uint8), mask=byte < bytes_)


@triton.jit  # type: ignore[untyped-decorator]
def unpack_kernel(kept: tl.tensor, out: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    """out: contiguous numbers, or bools as int8."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    byte = tl.load(kept + at // 8, mask=inside, other=0).to(tl.int32)
    flag = byte >> (at % 8).to(tl.int32) & 1
    tl.store(out + at, flag.to(tl.float32).to(out.dtype.element_ty), mask=inside)


def round_groups(x: Tensor, bits: int, seed: Tensor, salt: int, shape: Sequence[int], runs: Sequence[int]) -> Tensor:
    """As `autopar.ops.saved_forms.round_groups_reference`, of a block that lies in rows."""
    x, count = x.contiguous(), x.numel()
    rows = as_rows(shape, saved_forms.nested_runs(runs))
    assert rows is not None, "the registry asks first"
    first, row_stride, num_rows = rows
    columns = count // num_rows
    if row_stride == columns:
        columns, num_rows = count, 1
    aligned = first % LANES.value == 0 and (num_rows == 1 or (row_stride % 4 == 0 and columns % 4 == 0))
    kept = x.new_empty(saved_forms.rounded_bytes(count, bits), dtype=torch.uint8)
    groups, codes, ranges = _parts(kept, count, bits)
    round_kernel[(triton.cdiv(groups, GROUPS),)](
        x, codes, ranges, seed, salt, first, row_stride, columns, count, groups,
        BITS=bits, ALIGNED=aligned, GROUPS=GROUPS, num_warps=8,
    )  # fmt: skip
    return kept


def unround_groups(kept: Tensor, bits: int, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `autopar.ops.saved_forms.unround_groups_reference`."""
    out, count = kept.new_empty(size, dtype=dtype), math.prod(size)
    _, codes, ranges = _parts(kept, count, bits)
    unround_kernel[(triton.cdiv(count, BLOCK),)](codes, ranges, out, count, BITS=bits, BLOCK=BLOCK, num_warps=8)
    return out


def pack_bits(x: Tensor) -> Tensor:
    """As `autopar.ops.saved_forms.pack_bits_reference`."""
    x, count = x.contiguous(), x.numel()
    out = x.new_empty(saved_forms.packed_bytes(count), dtype=torch.uint8)
    given = x.view(torch.int8) if x.dtype == torch.bool else x
    pack_kernel[(triton.cdiv(count, BLOCK),)](given, out, count, len(out), BLOCK=BLOCK)
    return out


def unpack_bits(kept: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `autopar.ops.saved_forms.unpack_bits_reference`."""
    out, count = kept.new_empty(size, dtype=dtype), math.prod(size)
    taken = out.view(torch.int8) if dtype == torch.bool else out
    unpack_kernel[(triton.cdiv(count, BLOCK),)](kept, taken, count, BLOCK=BLOCK, num_warps=8)
    return out


def _parts(kept: Tensor, count: int, bits: int) -> tuple[int, Tensor, Tensor]:
    """(groups, codes, ranges) of what is kept of so many values."""
    groups = -(-count // GROUP.value)
    end = groups * GROUP.value * bits // 8
    return groups, kept[:end], kept[end:].view(torch.float32)
