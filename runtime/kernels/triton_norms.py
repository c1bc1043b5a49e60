"""RMS norm and layer norm of whole rows in Triton: a row is read once and stays in registers, forward and backward.

    forward    total = x + residual; statistics; out              reads x (and residual), writes out (and total)
    backward   one program takes many rows; what they add to the gradients of weight and bias stays in registers and
               is written once per program; torch adds the programs' parts in a fixed order, so runs are repeatable

The functions have the signatures of the references in `autopar.ops.norms`. To Triton a pointer or a number is a
`tl.tensor`. An RMS norm is a layer norm that is not CENTRED, a constant.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.ops.norms import order_in_memory, row_count

STAGES = 3
"""Rows of a backward pass that are read at a time."""
FORWARD_ELEMENTS = 512
"""Of a row, per warp: 16 a lane, so that its arrays fit the registers (benchmarks/results/kernels.json)."""
BACKWARD = ((4096, 512, 132 * 16), (8192, 256, 132 * 32))
"""(largest block, its elements per warp, warps of all programs): they run at once on the 132 multiprocessors of an
H100, and their parts are few. The first beside (256, 132 * 32) and 2 stages (H100, torch 2.11, triton 3.6): layer norm
of 8192 x 4096 117 us against 156, of 16384 x 768 60 against 62; RMS norm 106 against 110, else equal. The second by
registers."""


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    eps: tl.tensor,
    columns: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row of `columns` elements; statistics are fp32, one per row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    at = row * columns + column
    value = tl.load(x + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        other = tl.load(residual + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(total + at, value, mask=inside)
    wide = value.to(tl.float32)
    if CENTRED:
        average = tl.sum(wide, axis=0) / columns
        tl.store(mean + row, average)
        wide = tl.where(inside, wide - average, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / columns + eps)
    tl.store(rstd + row, inverse)
    result = wide * inverse
    if not CENTRED:
        result = result.to(value.dtype).to(tl.float32)  # as models write an RMS norm out
    result *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(value.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def add_both(one: tl.tensor, other: tl.tensor, first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Two sums in one reduction."""
    return one + first, other + second


@triton.jit  # type: ignore[untyped-decorator]
def norm_backward_kernel(
    grad: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    added: tl.tensor,
    grad_x: tl.tensor,
    weight_parts: tl.tensor,
    bias_parts: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    HAS_ADDED: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Program p takes every row whose number is p modulo the programs, reads STAGES of them ahead, and writes row p of
    the fp32 parts (programs, columns)."""
    program, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    bias_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    inverse, average = tl.load(rstd + program), tl.load(mean + program)
    for row in tl.range(program, rows, step, num_stages=STAGES):
        following = tl.minimum(row + step, rows - 1)
        next_inverse, next_average = tl.load(rstd + following), tl.load(mean + following)
        at = row * columns + column
        outer = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=inside, other=0.0)
        inner = outer * scale
        if CENTRED:
            normed = tl.where(inside, value.to(tl.float32) - average, 0.0) * inverse
            product, total = tl.reduce((inner * normed, inner), 0, add_both)
            result = inner - (normed * (product / columns) + total / columns)
            bias_sum += outer
        else:
            normed = value.to(tl.float32) * inverse
            result = inner - normed * (tl.sum(inner * normed, axis=0) / columns)
        result *= inverse
        if HAS_ADDED:
            result += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + at, result.to(value.dtype), mask=inside)
        weight_sum += outer * normed
        inverse, average = next_inverse, next_average
    part = program * columns + column
    tl.store(weight_parts + part, weight_sum, mask=inside)
    if CENTRED:
        tl.store(bias_parts + part, bias_sum, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `rms_norm_reference`."""
    out, _, _, rstd = _forward(x, None, weight, None, eps)
    return out, rstd


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `add_rms_norm_reference`."""
    out, total, _, rstd = _forward(x, residual, weight, None, eps)
    return out, total, rstd


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `layer_norm_reference`."""
    out, _, mean, rstd = _forward(x, None, weight, bias, eps)
    return out, mean, rstd


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `add_layer_norm_reference`."""
    return _forward(x, residual, weight, bias, eps)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, added: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `rms_norm_backward_reference`."""
    grad_x, grad_weight, _ = _backward(grad, x, weight, None, rstd, added)
    return grad_x, grad_weight


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, added: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `layer_norm_backward_reference`."""
    return _backward(grad, x, weight, mean, rstd, added)


def warps_for(block: int, elements: int) -> int:
    """Warps of a program that holds `block` elements of a row, so many per warp: 1 to 32."""
    return max(1, min(32, block // elements))


def backward_warps(block: int) -> tuple[int, int]:
    """(warps of a program, most of all programs) of a backward pass over rows of `block` elements."""
    elements, largest = next(rest for least, *rest in BACKWARD if block <= least)
    return warps_for(block, elements), largest


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order = order_in_memory(x)
    x, weight = x.permute(order).contiguous(), weight.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x) if residual is not None else x
    mean, rstd = (x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) for _ in range(2))
    block = triton.next_power_of_2(x.shape[-1])
    norm_kernel[(row_count(x),)](
        x,
        x if residual is None else residual.permute(order).contiguous(),
        weight,
        weight if bias is None else bias.contiguous(),
        out,
        total,
        mean,
        rstd,
        eps,
        x.shape[-1],
        HAS_RESIDUAL=residual is not None,
        CENTRED=bias is not None,
        BLOCK=block,
        num_warps=warps_for(block, FORWARD_ELEMENTS),
    )
    out, total, mean, rstd = (one.permute(_back(order)) for one in (out, total, mean, rstd))
    return out, total, mean, rstd


def _back(order: list[int]) -> list[int]:
    """What turns dims in an order back."""
    return sorted(range(len(order)), key=order.__getitem__)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, added: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    order = order_in_memory(x)
    grad, x, rstd = (one.permute(order).contiguous() for one in (grad, x, rstd))
    weight = weight.contiguous()
    rows, columns = row_count(x), x.shape[-1]
    block = triton.next_power_of_2(columns)
    warps, largest = backward_warps(block)
    programs = min(rows, max(1, largest // warps))
    grad_x = torch.empty_like(x)
    weight_parts = x.new_empty((programs, columns), dtype=torch.float32)
    bias_parts = weight_parts if mean is None else torch.empty_like(weight_parts)
    norm_backward_kernel[(programs,)](
        grad,
        x,
        weight,
        rstd if mean is None else mean.permute(order).contiguous(),
        rstd,
        x if added is None else added.permute(order).contiguous(),
        grad_x,
        weight_parts,
        bias_parts,
        rows,
        columns,
        HAS_ADDED=added is not None,
        CENTRED=mean is not None,
        BLOCK=block,
        STAGES=STAGES,
        num_warps=warps,
    )
    grad_x, grad_weight = grad_x.permute(_back(order)), weight_parts.sum(0)
    return grad_x, grad_weight, grad_weight if mean is None else bias_parts.sum(0)
