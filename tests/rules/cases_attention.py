"""Cases of attention: our operator with every kind of mask and of batch dims, and torch's kernels that run on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.rules.case_values import Arguments, Case, autopar_ops, bools, case, x
from tests.rules.kernel_stand_ins import STAND_INS

aten = torch.ops.aten


def _attention(
    causal: bool, dropout: float, groups: int, mask: Callable[[int], Tensor | None], batch: tuple[int, ...] = (3,),
    window: tuple[int, ...] = (),
) -> Callable[[int], Arguments]:
    def build(s: int) -> Arguments:
        length = s if causal or window else 5
        q, k, v = x(*batch, 4 * groups, s, 4), x(*batch, 4, length, 4), x(*batch, 4, length, 4)
        return q, k, v, mask(s), dropout, causal, None, 3, *window

    return build


def _ring(
    causal: bool, dropout: float, groups: int, mask: Callable[[int], Tensor | None], batch: tuple[int, ...] = (3,),
    window: tuple[int, ...] = (),
) -> Callable[[int], Arguments]:
    def build(s: int) -> Arguments:
        q, k, v = x(*batch, 4 * groups, s, 4), x(*batch, 4, s, 4), x(*batch, 4, s, 6)
        return q, k, v, mask(s), dropout, causal, None, 3, *window

    return build


def _backward(forward: Callable[[int], Arguments]) -> Callable[[int], Arguments]:
    def build(s: int) -> Arguments:
        q, k, v, mask, *options = forward(s)
        out, lse = autopar_ops.attention.default(q, k, v, mask, *options)
        return x(*out.shape), q, k, v, mask, out, lse, *options

    return build


FORWARD = {
    "plain": _attention(False, 0.0, 1, lambda s: None),
    "causal": _attention(True, 0.0, 1, lambda s: None),
    "grouped": _attention(False, 0.0, 2, lambda s: x(3, 1, s, 5)),
    "dropout": _attention(True, 0.3, 2, lambda s: None),
    "mask": _attention(False, 0.0, 1, lambda s: bools(s, 5) | (torch.arange(5) == 0)),
    "two_batch_dims": _attention(False, 0.0, 2, lambda s: x(4, 1, 1, s, 5), (4, 3)),
    "window": _attention(True, 0.0, 2, lambda s: None, window=(3,)),
    "window_on_both_sides": _attention(False, 0.3, 1, lambda s: None, window=(2,)),
    "window_and_mask": _attention(True, 0.0, 2, lambda s: bools(3, 1, 1, s), window=(3,)),
}
RING = {
    "plain": _ring(False, 0.0, 1, lambda s: None),
    "causal": _ring(True, 0.0, 1, lambda s: None),
    "grouped": _ring(True, 0.0, 2, lambda s: None),
    "dropout": _ring(True, 0.3, 2, lambda s: None),
    "mask": _ring(False, 0.0, 1, lambda s: bools(s, s) | torch.eye(s, dtype=torch.bool)),
    "bias": _ring(True, 0.0, 2, lambda s: x(3, 1, s, s)),
    "bias_of_keys": _ring(False, 0.3, 1, lambda s: x(3, 1, 1, s)),
    "two_batch_dims": _ring(False, 0.0, 2, lambda s: x(4, 1, 1, s, s), (4, 3)),
    "window": _ring(True, 0.0, 2, lambda s: None, window=(3,)),
    "window_with_dropout": _ring(True, 0.3, 2, lambda s: None, window=(2,)),
    "window_on_both_sides": _ring(False, 0.0, 1, lambda s: None, window=(2,)),
    "window_and_mask": _ring(True, 0.0, 2, lambda s: x(3, 1, 1, s), window=(3,)),
}
WITH_MASK_GRADIENT = {
    "bias_of_all": _attention(False, 0.0, 1, lambda s: x(3, 4, s, 5)),
    "bias_of_heads": _attention(False, 0.0, 2, lambda s: x(1, 8, s, 5)),
    "bias_of_keys": _attention(False, 0.3, 1, lambda s: x(3, 1, 1, 5)),
    "pair_bias": _attention(False, 0.0, 1, lambda s: x(4, 1, 4, s, 5), (4, 3)),
    "bias_of_pairs": _attention(False, 0.0, 1, lambda s: x(s, 5)),
}


def _native(causal: bool, *options: Any) -> Callable[[int], Arguments]:
    """Arguments of a forward kernel of torch; options follow query, key and value."""

    def build(s: int) -> Arguments:
        length = s if causal else 5
        return x(3, 4, s, 4), x(3, 4, length, 4), x(3, 4, length, 4), *options

    return build


def _biased(*options: Any) -> Callable[[int], Arguments]:
    return lambda s: (x(3, 4, s, 4), x(3, 4, 5, 4), x(3, 4, 5, 4), x(1, 4, s, 5), *options)


def _kernel_backward(name: str) -> Callable[[int], Arguments]:
    """Arguments of a backward kernel of torch, whose order differs from kernel to kernel."""

    def build(s: int) -> Arguments:
        q, k, v, bias = x(3, 4, s, 4), x(3, 4, 5, 4), x(3, 4, 5, 4), x(1, 4, s, 5)
        out, lse = autopar_ops.attention.default(q, k, v, None if "flash" in name else bias, 0.0, False, None, 0)
        grad, nothing, number = x(*out.shape), torch.empty(0), torch.zeros((), dtype=torch.int64)
        lengths = (nothing, nothing, s, 5)
        tensors = (grad, q, k, v)
        return {
            "flash_attention_for_cpu": (*tensors, out, lse, 0.0, False),
            "flash_attention": (*tensors, out, lse, *lengths, 0.0, False, number, number),
            "efficient_attention": (*tensors, bias, out, lse, number, number, 0.0, [True] * 4),
            "cudnn_attention": (*tensors, out, lse.unsqueeze(-1), number, number, bias, *lengths, 0.0, False),
            "fused_attention_overrideable": (
                *(*tensors, bias, [True] * 4, out, lse, *lengths),
                *(0.0, False, number, number),
            ),
        }[name]

    return build


NATIVE = {
    "flash_attention_for_cpu": _native(False),
    "flash_attention_for_cpu/causal": _native(True, 0.0, True),
    "flash_attention": _native(False),
    "flash_attention/causal": _native(True, 0.0, True),
    "efficient_attention": _biased(True),
    "efficient_attention/no_bias": _native(True, None, True, 0.0, True),
    "cudnn_attention": _biased(True),
    "fused_attention_overrideable": _biased(),
}


def _kernel(name: str) -> Any:
    return getattr(aten, f"_scaled_dot_product_{name}").default


CASES: list[Case] = [
    *[case(autopar_ops.attention.default, build, label) for label, build in FORWARD.items()],
    *[case(autopar_ops.attention_backward.default, _backward(build), label) for label, build in FORWARD.items()],
    *[case(autopar_ops.ring_attention.default, build, label) for label, build in RING.items()],
    *[case(autopar_ops.ring_attention_backward.default, _backward(build), label) for label, build in RING.items()],
    *[
        case(autopar_ops.attention_backward_with_mask.default, _backward(build), label)
        for label, build in WITH_MASK_GRADIENT.items()
    ],
    case(autopar_ops.rope.default, lambda s: (x(4, s, 6, 4), x(4, 6, 4), x(4, 6, 4), False)),
    case(autopar_ops.rope.default, lambda s: (x(2, 4, s, 4), x(1, s, 4), x(1, s, 4), True), "shared"),
    case(autopar_ops.rope_backward.default, lambda s: (x(2, 4, s, 4), x(1, s, 4), x(1, s, 4), False)),
    *[case(_kernel(label.partition("/")[0]), build, label.partition("/")[2]) for label, build in NATIVE.items()],
    *[case(_kernel(f"{name}_backward"), _kernel_backward(name)) for name in ("flash_attention_for_cpu", *STAND_INS)],
]
