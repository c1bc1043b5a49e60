"""A Triton kernel as a user writes it, inside an operator of `torch.library.triton_op` and launched without one.

The operator runs its formula on a CPU, where no Triton kernel can run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.library import triton_op, wrap_triton

BLOCK = 128


@triton.jit
def scale_columns_kernel(x_ptr, scale_ptr, out_ptr, count, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(x_ptr + at, mask=inside)
    scale = tl.load(scale_ptr + at % columns, mask=inside)
    tl.store(out_ptr + at, x * scale, mask=inside)


@triton_op("autopar_door::scale_columns", mutates_args={})
def scale_columns(x: Tensor, scale: Tensor) -> Tensor:
    """(M, N), (N) -> (M, N)."""
    x, out = x.contiguous(), torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    wrap_triton(scale_columns_kernel)[grid](x, scale, out, x.numel(), x.shape[1], BLOCK=BLOCK)
    return out


@scale_columns.register_kernel("cpu")
def _(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, scale = ctx.saved_tensors
    return scale_columns(grad, scale), (grad * x).sum(0)


scale_columns.register_autograd(_backward, setup_context=_save)


class BareKernel(nn.Module):
    """Its forward launches the kernel without an operator; `wrapped`: through `wrap_triton`."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.wrapped = wrapped

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel = wrap_triton(scale_columns_kernel) if self.wrapped else scale_columns_kernel
        kernel[(1,)](x, self.scale, out, x.numel(), x.shape[1], BLOCK=BLOCK)
        return out.mean() + self.scale.sum()
