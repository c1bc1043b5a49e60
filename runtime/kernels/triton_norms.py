"""RMS norm and layer norm of whole rows in Triton: a row is read once and stays in registers, forward and backward.

    forward    total = x + residual; statistics; out              reads x (and residual), writes out (and total)
    backward   one program takes several rows; what they add to the gradients of weight and bias stays in registers and
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

LARGEST_PROGRAMS = 1024
"""Programs of a backward pass: several for each multiprocessor of the largest device, whose parts are quickly added."""
FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 512, 256
"""Of a row, per warp: 16 and 8 a lane, so that its arrays fit the registers (benchmarks/results/kernels.json)."""


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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program p takes rows p * ROWS to (p + 1) * ROWS and writes row p of the fp32 parts (programs, columns)."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    bias_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in range(ROWS):
        row = program * ROWS + index
        here = inside & (row + tl.zeros((BLOCK,), dtype=tl.int64) < rows)  # a vector: masks may not be scalars
        at = row * columns + column
        known = tl.minimum(row, rows - 1)
        inverse = tl.load(rstd + known)
        value = tl.load(x + at, mask=here, other=0.0)
        wide = value.to(tl.float32)
        if CENTRED:
            wide = tl.where(here, wide - tl.load(mean + known), 0.0)
        normed = wide * inverse
        outer = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
        inner = outer * scale
        shift = normed * (tl.sum(inner * normed, axis=0) / columns)
        if CENTRED:
            shift += tl.sum(inner, axis=0) / columns
            bias_sum += outer
        result = (inner - shift) * inverse
        if HAS_ADDED:
            result += tl.load(added + at, mask=here, other=0.0).to(tl.float32)
        tl.store(grad_x + at, result.to(value.dtype), mask=here)
        weight_sum += outer * normed
    tl.store(weight_parts + program * columns + column, weight_sum, mask=inside)
    if CENTRED:
        tl.store(bias_parts + program * columns + column, bias_sum, mask=inside)


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
    per_program = triton.cdiv(rows, LARGEST_PROGRAMS)
    programs, block = triton.cdiv(rows, per_program), triton.next_power_of_2(columns)
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
        ROWS=per_program,
        BLOCK=block,
        num_warps=warps_for(block, BACKWARD_ELEMENTS),
    )
    grad_x, grad_weight = grad_x.permute(_back(order)), weight_parts.sum(0)
    return grad_x, grad_weight, grad_weight if mean is None else bias_parts.sum(0)
