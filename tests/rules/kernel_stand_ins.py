"""Torch's attention kernels of GPUs, on a CPU: our formulas in the shapes that each schema returns.

A rule can then be executed where its kernel cannot. Shapes of the states of random numbers and of unused outputs are
those that torch's kernels return without dropout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.attention_formulas import ScoreOptions
from autopar.ops.attention_math import attend, attend_backward, attend_backward_with_mask

_CPU = torch.library.Library("aten", "IMPL", "CPU")
_ATEN = torch.ops.aten


def _options(mask: Tensor | None, is_causal: bool, scale: float | None) -> ScoreOptions:
    return ScoreOptions(mask=mask, is_causal=is_causal, scale=scale)


def _number() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, debug: bool = False, *, scale: Any = None
) -> Any:
    out, lse = attend(q, k, v, _options(None, causal, scale))
    return out, lse, torch.empty(0), torch.empty(0), q.shape[2], k.shape[2], torch.zeros(2), _number(), torch.empty(0)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: Tensor, cum_k: Tensor,
    max_q: int, max_k: int, p: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: Any = None,
) -> Any:  # fmt: skip
    return attend_backward(grad, q, k, v, out, lse, _options(None, causal, scale))


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_lse: bool, p: float = 0.0, causal: bool = False,
    *, scale: Any = None,
) -> Any:  # fmt: skip
    return *attend(q, k, v, _options(bias, causal, scale)), _number(), _number()


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, p: float, wanted: list[bool], causal: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    return attend_backward_with_mask(grad, q, k, v, out, lse, _options(bias, causal, scale))


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_lse: bool, p: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    out, lse = attend(q, k, v, _options(bias, causal, scale))
    nothing = torch.empty(0)
    return out, lse.unsqueeze(-1), nothing, nothing, q.shape[2], k.shape[2], _number(), _number(), nothing


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
    bias: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int, p: float, causal: bool, *, scale: Any = None,
) -> Any:  # fmt: skip
    return attend_backward(grad, q, k, v, out, lse.squeeze(-1), _options(bias, causal, scale))


def _overrideable(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, p: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    out, lse = attend(q, k, v, _options(bias, causal, scale))
    nothing = torch.empty(0)
    return out, lse, nothing, nothing, q.shape[2], k.shape[2], _number(), _number(), nothing


def _overrideable_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, wanted: list[bool], out: Tensor, lse: Tensor,
    cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int, p: float, causal: bool, seed: Tensor, offset: Tensor,
    *, scale: Any = None,
) -> Any:  # fmt: skip
    return attend_backward_with_mask(grad, q, k, v, out, lse, _options(bias, causal, scale))


STAND_INS = {
    "flash_attention": (_flash, _flash_backward),
    "efficient_attention": (_efficient, _efficient_backward),
    "cudnn_attention": (_cudnn, _cudnn_backward),
    "fused_attention_overrideable": (_overrideable, _overrideable_backward),
}

for _name, (_forward, _backward) in STAND_INS.items():
    _CPU.impl(getattr(_ATEN, f"_scaled_dot_product_{_name}").default, _forward)
    _CPU.impl(getattr(_ATEN, f"_scaled_dot_product_{_name}_backward").default, _backward)
