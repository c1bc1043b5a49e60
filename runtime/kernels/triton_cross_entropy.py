"""Vocabulary-parallel cross-entropy in Triton: the statistics of a row in one pass, the gradient in one pass.

Forward keeps a maximum and a sum per lane, rescaled whenever the maximum grows, and joins the lanes once at the end, so
logits are read once and nothing as large as they is written. Backward reads rows whose gradient is not 0 only: ignored
labels cost a write. The functions have the signatures of the references in `autopar.ops.cross_entropy`. To Triton a
pointer or a number is a `tl.tensor`. WIDTH is a constant: a program has few vocabulary sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.ops.cross_entropy import row_results

LARGEST_BLOCK = 4096
NUM_WARPS = 8


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
    BLOCK: tl.constexpr,
) -> None:
    """One program per row of WIDTH logits, rows STRIDE apart; maximum, total, picked: fp32, one per row."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * STRIDE
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for offset in range(0, WIDTH, BLOCK):
        column = offset + lane
        value = tl.load(base + column, mask=column < WIDTH, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(top, value)
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        sums = sums * tl.exp(top - finite) + tl.exp(value - finite)
        top = larger
    highest = tl.max(top, axis=0)
    finite_highest = tl.where(highest == float("-inf"), 0.0, highest)
    local = tl.load(target + row) - start
    inside = (local >= 0) & (local < WIDTH)
    tl.store(maximum + row, highest)
    tl.store(total + row, tl.sum(sums * tl.exp(top - finite_highest), axis=0))
    tl.store(picked + row, tl.load(base + local, mask=inside, other=0.0).to(tl.float32))


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
    chance = tl.exp(value.to(tl.float32) - tl.load(top + row) - tl.load(log_total + row))
    chosen = (column == tl.load(target + row) - start) & (column < WIDTH)
    result = factor * (chance - chosen.to(tl.float32))
    tl.store(grad + row * COLUMNS + column, result.to(value.dtype), mask=column < COLUMNS)


def cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `cross_entropy_reference`: the pass over the logits, and a few operations on a number per row."""
    maximum, total, picked = cross_entropy_rows(logits, target, 0)
    return row_results(picked, target, maximum, total, 0, logits.shape[1])


def cross_entropy_rows(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `cross_entropy_rows_reference`."""
    logits = _dense_in_rows(logits)
    rows, width = logits.shape
    maximum, total, picked = (logits.new_empty((rows,), dtype=torch.float32) for _ in range(3))
    rows_kernel[(rows,)](
        logits,
        target.contiguous(),
        maximum,
        total,
        picked,
        start,
        STRIDE=logits.stride(0),
        WIDTH=width,
        BLOCK=_block(width),
        num_warps=NUM_WARPS,
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


def _block(width: int) -> int:
    return int(min(LARGEST_BLOCK, triton.next_power_of_2(width)))
