"""Gated activations in Triton: act(gate) * up, and both gradients, in one pass over the elements.

The functions have the signatures of the references in `autopar.ops.gated`. tanh is written through the sigmoid,
tanh(z) = 2 sigmoid(2 z) - 1, which Triton's interpreter has, too. To Triton a pointer or a number is a
`tl.tensor`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.ops.gated import ACTIVATIONS

BLOCK = 1024
SILU = tl.constexpr(ACTIVATIONS.index("silu"))
GELU = tl.constexpr(ACTIVATIONS.index("gelu"))
ROOT_HALF = tl.constexpr(0.7071067811865476)
ROOT_TWO_PI = tl.constexpr(0.3989422804014327)
"""1 / sqrt(2 pi): the height of the normal density."""
TANH_SCALE = tl.constexpr(0.7978845608028654)
TANH_CUBE = tl.constexpr(0.044715)


@triton.jit  # type: ignore[untyped-decorator]
def activated(z: tl.tensor, ACTIVATION: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(act(z), its derivative) in fp32."""
    if ACTIVATION == SILU:
        part = tl.sigmoid(z)
        value = z * part
        slope = part * (1.0 + z * (1.0 - part))
    elif ACTIVATION == GELU:
        part = 0.5 * (1.0 + tl.erf(z * ROOT_HALF))
        value = z * part
        slope = part + z * tl.exp(-0.5 * z * z) * ROOT_TWO_PI
    else:
        inner = TANH_SCALE * (z + TANH_CUBE * z * z * z)
        part = tl.sigmoid(2.0 * inner)
        value = z * part
        slope = part + z * 2.0 * part * (1.0 - part) * TANH_SCALE * (1.0 + 3.0 * TANH_CUBE * z * z)
    return value, slope


@triton.jit  # type: ignore[untyped-decorator]
def gated_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    elements: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    given = tl.load(gate + at, mask=inside, other=0.0)
    value, _ = activated(given.to(tl.float32), ACTIVATION)
    result = value * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(given.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def gated_backward_kernel(
    grad: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    grad_gate: tl.tensor,
    grad_up: tl.tensor,
    elements: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    given = tl.load(gate + at, mask=inside, other=0.0)
    outer = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    value, slope = activated(given.to(tl.float32), ACTIVATION)
    inner = outer * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_gate + at, (inner * slope).to(given.dtype), mask=inside)
    tl.store(grad_up + at, (outer * value).to(given.dtype), mask=inside)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """As `gated_reference`."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    gated_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
        gate, up, out, gate.numel(), ACTIVATION=ACTIVATIONS.index(activation), BLOCK=BLOCK
    )
    return out


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """As `gated_backward_reference`."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    gated_backward_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
        grad, gate, up, grad_gate, grad_up, gate.numel(), ACTIVATION=ACTIVATIONS.index(activation), BLOCK=BLOCK
    )
    return grad_gate, grad_up
