"""Vocabulary-parallel cross-entropy in Triton: the statistics of a row in one pass, the gradient in one pass.

Forward keeps a maximum and a sum for each group of neighbours, rescaled whenever the maximum grows, and joins them once
at the end, so logits are read once and nothing as large as they is written. Rows of an odd width begin anywhere: their
groups begin where 16 bytes do, and what belongs to another row is left out once it is read. Backward reads rows whose
gradient is not 0 only: ignored labels cost a write. The functions have the signatures of the references in
`autopar.ops.cross_entropy`. To Triton a pointer or a number is a `tl.tensor`. WIDTH is a constant: a program has few
vocabulary sizes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(math.log2(math.e))
LARGEST_BLOCK = 4096
NUM_WARPS = 8
DEEP = 8
"""Neighbours of a row that a lane takes together: 16 bytes of bf16, which share one maximum."""
GROUPS = 2
"""Such groups of a lane, where a program has them."""


@triton.jit  # type: ignore[untyped-decorator]
def rows_kernel(
    logits: tl.tensor,
    target: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    picked: tl.tensor,
    start: tl.tensor,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    DEEP: tl.constexpr,
    FILLED: tl.constexpr,
    FINISHED: tl.constexpr,
) -> None:
    """One program per row of WIDTH logits, rows STRIDE apart; maximum, total, picked: fp32, one per row. FILLED: what
    the last row ends in is a whole group of DEEP in memory. FINISHED: total and picked are those of `cross_entropy`."""
    row = tl.program_id(0).to(tl.int64)
    local = tl.load(target + row) - start
    inside = (local >= 0) & (local < WIDTH)
    chosen = tl.load(logits + row * STRIDE + local, mask=inside, other=0.0).to(tl.float32)
    group = row * STRIDE // DEEP * DEEP
    lead = (row * STRIDE - group).to(tl.int32)  # elements of the row before in its first group
    lane = tl.arange(0, LANES)[:, None] * DEEP
    top = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    sums = tl.zeros((LANES,), dtype=tl.float32)
    for offset in range(0, WIDTH if STRIDE % DEEP == 0 else WIDTH + DEEP, LANES * DEEP):
        column = offset + lane + tl.arange(0, DEEP)[None, :]
        if WIDTH % DEEP == 0 and STRIDE % DEEP == 0:
            value = tl.load(logits + row * STRIDE + column, mask=column < WIDTH, other=float("-inf")).to(tl.float32)
        elif (offset > 0) & (offset + LANES * DEEP <= WIDTH):
            value = tl.load(logits + group + column).to(tl.float32)
        else:
            there = (column >= lead) & (column < lead + WIDTH)
            read = (offset + lane < lead + WIDTH) if FILLED else there
            value = tl.load(logits + group + column, mask=read, other=0.0).to(tl.float32)
            value = tl.where(there, value, float("-inf"))
        larger = tl.maximum(top, tl.max(value, axis=1))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2((value - finite[:, None]) * LOG2_E)
        sums = sums * tl.exp2((top - finite) * LOG2_E) + tl.sum(weights, axis=1)
        top = larger
    highest = tl.max(top, axis=0)
    finite_highest = tl.where(highest == float("-inf"), 0.0, highest)
    added = tl.sum(sums * tl.exp2((top - finite_highest) * LOG2_E), axis=0)
    if FINISHED:
        added = tl.log(added)
        chosen = tl.where(inside, chosen - highest - added, 0.0)
    tl.store(maximum + row, highest)
    tl.store(total + row, added)
    tl.store(picked + row, chosen)


@triton.jit  # type: ignore[untyped-decorator]
def backward_kernel(
    logits: tl.tensor,
    target: tl.tensor,
    top: tl.tensor,
    log_total: tl.tensor,
    scale: tl.tensor,
    grad: tl.tensor,
    start: tl.tensor,
    TILES: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per tile of BLOCK of the COLUMNS of a row of grad; 0 behind the WIDTH logits, rows STRIDE apart."""
    program = tl.program_id(0).to(tl.int64)
    row = program // TILES
    column = program % TILES * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(scale + row)
    read = tl.where(factor != 0.0, WIDTH, 0)
    value = tl.load(logits + row * STRIDE + column, mask=column < read, other=float("-inf"))
    chance = tl.exp2((value.to(tl.float32) - tl.load(top + row) - tl.load(log_total + row)) * LOG2_E)
    chosen = (column == tl.load(target + row) - start) & (column < WIDTH)
    result = factor * (chance - chosen.to(tl.float32))
    tl.store(grad + row * COLUMNS + column, result.to(value.dtype), mask=column < COLUMNS)


def cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `cross_entropy_reference`."""
    maximum, log_total, chance = _statistics(logits, target, 0, finished=True)
    return chance, maximum, log_total


def cross_entropy_rows(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `cross_entropy_rows_reference`."""
    return _statistics(logits, target, start, finished=False)


def _statistics(logits: Tensor, target: Tensor, start: int, *, finished: bool) -> tuple[Tensor, Tensor, Tensor]:
    logits = _dense_in_rows(logits)
    rows, width = logits.shape
    maximum, total, picked = (logits.new_empty((rows,), dtype=torch.float32) for _ in range(3))
    lanes = max(1, _block(width) // DEEP)
    rows_kernel[(rows,)](
        logits,
        target.contiguous(),
        maximum,
        total,
        picked,
        start,
        STRIDE=logits.stride(0),
        WIDTH=width,
        LANES=lanes,
        DEEP=DEEP,
        FILLED=_is_filled(logits),
        FINISHED=finished,
        num_warps=max(1, min(NUM_WARPS, lanes // (32 * GROUPS))),
    )
    return maximum, total, picked


def cross_entropy_backward(
    logits: Tensor, target: Tensor, top: Tensor, log_total: Tensor, scale: Tensor, start: int,
    columns: int | None = None,
) -> Tensor:  # fmt: skip
    """As `cross_entropy_backward_reference`."""
    grad = logits.new_empty(logits.shape[0], logits.shape[1] if columns is None else columns)
    write_gradient(_dense_in_rows(logits), target, top, log_total, scale, start, grad)
    return grad


def write_gradient(
    logits: Tensor, target: Tensor, top: Tensor, log_total: Tensor, scale: Tensor, start: int, grad: Tensor
) -> None:
    """`cross_entropy_backward` into contiguous `grad`, which may be what the logits are part of."""
    rows, width = logits.shape
    columns = grad.shape[1]
    block = _block(columns)
    tiles = triton.cdiv(columns, block)
    backward_kernel[(rows * tiles,)](
        logits,
        target.contiguous(),
        top.contiguous(),
        log_total.contiguous(),
        scale.contiguous(),
        grad,
        start,
        TILES=tiles,
        STRIDE=logits.stride(0),
        WIDTH=width,
        COLUMNS=columns,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )


def _dense_in_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _is_filled(logits: Tensor) -> bool:
    """Whether the last row ends in a whole group of memory."""
    groups = triton.cdiv((len(logits) - 1) * logits.stride(0) + logits.shape[1], DEEP)
    elements = logits.untyped_storage().nbytes() // logits.element_size()
    return bool(logits.storage_offset() + groups * DEEP <= elements)


def _block(width: int) -> int:
    return int(min(LARGEST_BLOCK, triton.next_power_of_2(width)))
