"""Rotary position embedding as one operator, and its gradient as another: one read and one write.

    x1, x2 = x.chunk(2, -1); y = x * cos + cat((-x2, x1), -1) * sin
        -->   y = autopar::rope(x, cos, sin, False)
    z1, z2 = (dy * sin).chunk(2, -1); dx = dy * cos + cat((z2, -z1), -1)
        -->   dx = autopar::rope_backward(dy, cos, sin, False)

That is how Hugging Face's Llama writes it: element i of a head is turned with element i + D / 2. Interleaved, as the
paper has it (RoFormer, arXiv 2104.09864), element 2 i is turned with 2 i + 1. Backward turns the other way: where both
elements of a pair have one angle, it is forward with -sin. The bodies are the reference, computed in fp32 (fp64 for
fp64) and rounded once at the end.

x (B, H, S, D) of any strides, which the result has, too; cos and sin (1 or B, S, D); D even.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x * cos + turned(x) * sin, of the shape, strides and dtype of x."""
    wide, cos, sin = _wide(x, cos, sin)
    return torch.empty_like(x).copy_(wide * cos + _turned(wide, interleaved) * sin)


def rope_backward_reference(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The gradient of x, of the shape, strides and dtype of grad."""
    wide, cos, sin = _wide(grad, cos, sin)
    return torch.empty_like(grad).copy_(wide * cos - _turned(wide * sin, interleaved))


def _turned(x: Tensor, interleaved: bool) -> Tensor:
    """Every pair (a, b) as (-b, a)."""
    dim = -1 if interleaved else -2
    first, second = x.reshape(*x.shape[:-1], *((-1, 2) if interleaved else (2, -1))).unbind(dim)
    return torch.stack((-second, first), dim).flatten(-2)


def _wide(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All of one wide dtype, the angles the same for all heads."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.to(dtype), cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


rope = torch.library.custom_op(
    "autopar::rope",
    rope_reference,
    mutates_args=(),
    schema="(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
)
rope_backward = torch.library.custom_op(
    "autopar::rope_backward",
    rope_backward_reference,
    mutates_args=(),
    schema="(Tensor grad, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
)


@rope.register_fake
@rope_backward.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return torch.empty_like(x)
