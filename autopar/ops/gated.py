"""Gated activations as one operator: act(gate) * up, as in SwiGLU and GeGLU.

    a = silu(gate); y = a * up        -->   y = autopar::gated(gate, up, "silu")
    da = dy * up; dup = dy * a; dgate = silu_backward(da, gate)
                                      -->   dgate, dup = autopar::gated_backward(dy, gate, up, "silu")

Backward computes act(gate) again, so that it is not saved. Activations: "silu", "gelu" (erf) and "gelu_tanh". The
bodies are the reference, computed in fp32 (fp64 for fp64) and rounded once at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_aten = torch.ops.aten


def gated_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, of the shape and dtype of `gate`."""
    return (_activated(_wide(gate), activation) * _wide(up)).to(gate.dtype)


def gated_backward_reference(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """(gradient of gate, gradient of up)."""
    wide, grad_wide = _wide(gate), _wide(grad)
    inner = grad_wide * _wide(up)
    if activation == "silu":
        grad_gate = _aten.silu_backward.default(inner, wide)
    else:
        grad_gate = _aten.gelu_backward.default(inner, wide, approximate=_approximation(activation))
    return grad_gate.to(gate.dtype), (grad_wide * _activated(wide, activation)).to(up.dtype)


def _activated(x: Tensor, activation: str) -> Tensor:
    return functional.silu(x) if activation == "silu" else functional.gelu(x, approximate=_approximation(activation))


def _approximation(activation: str) -> str:
    return "tanh" if activation == "gelu_tanh" else "none"


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


gated = torch.library.custom_op(
    "autopar::gated",
    gated_reference,
    mutates_args=(),
    schema="(Tensor gate, Tensor up, str activation) -> Tensor",
)
gated_backward = torch.library.custom_op(
    "autopar::gated_backward",
    gated_backward_reference,
    mutates_args=(),
    schema="(Tensor grad, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
)


@gated.register_fake
def _(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return gate.new_empty(gate.shape)


@gated_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)
