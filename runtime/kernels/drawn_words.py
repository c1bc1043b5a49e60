"""The words of Philox in Triton, four of a counter, as `autopar.ops.philox` draws them."""

from __future__ import annotations

import triton
import triton.language as tl

from autopar.ops.philox import KEY_STEPS, MULTIPLIERS, ROUNDS

FIRST, SECOND = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
FIRST_STEP, SECOND_STEP = tl.constexpr(KEY_STEPS[0]), tl.constexpr(KEY_STEPS[1])
TURNS = tl.constexpr(ROUNDS)


@triton.jit  # type: ignore[untyped-decorator]
def four_words(counters: tl.tensor, salt: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """The four words of each counter (int64), uint32. A product of 64 bits is one instruction, its halves are two."""
    zero = counters * 0
    one, two = counters.to(tl.uint32), (counters >> 32).to(tl.uint32)
    three, four = (zero + salt).to(tl.uint32), zero.to(tl.uint32)
    key, other = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for turn in tl.static_range(TURNS):
        low, high = one.to(tl.uint64) * FIRST, three.to(tl.uint64) * SECOND
        one = (high >> 32).to(tl.uint32) ^ two ^ (key + tl.cast(turn * FIRST_STEP & 0xFFFFFFFF, tl.uint32))
        three = (low >> 32).to(tl.uint32) ^ four ^ (other + tl.cast(turn * SECOND_STEP & 0xFFFFFFFF, tl.uint32))
        two, four = high.to(tl.uint32), low.to(tl.uint32)
    return one, two, three, four


@triton.jit  # type: ignore[untyped-decorator]
def zeros_in_place(values: tl.tensor) -> tl.tensor:
    """int32 zeros for each four of `values` (..., 2, 2), in the lane that holds them: counters to which they are added
    are computed there, and their words need no exchange. No compiler knows that a grid has no third dim."""
    one, _ = tl.split(values)
    one, _ = tl.split(one)
    return one.to(tl.float32).to(tl.int32, bitcast=True) & tl.program_id(2)
