"""Cases of attention: our operator with every kind of mask and of batch dims, and torch's kernels that run on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.rules.case_values import Arguments, Case, autopar_ops, bools, case, x

aten = torch.ops.aten


def _attention(
    causal: bool, dropout: float, groups: int, mask: Callable[[int], Tensor | None], batch: tuple[int, ...] = (3,)
) -> Callable[[int], Arguments]:
    def build(s: int) -> Arguments:
        length = s if causal else 5
        q, k, v = x(*batch, 4 * groups, s, 4), x(*batch, 4, length, 4), x(*batch, 4, length, 4)
        return q, k, v, mask(s), dropout, causal, None, 3

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
}
WITH_MASK_GRADIENT = {
    "bias_of_all": _attention(False, 0.0, 1, lambda s: x(3, 4, s, 5)),
    "bias_of_heads": _attention(False, 0.0, 2, lambda s: x(1, 8, s, 5)),
    "bias_of_keys": _attention(False, 0.3, 1, lambda s: x(3, 1, 1, 5)),
    "pair_bias": _attention(False, 0.0, 1, lambda s: x(4, 1, 4, s, 5), (4, 3)),
    "bias_of_pairs": _attention(False, 0.0, 1, lambda s: x(s, 5)),
}


def _flash_for_cpu(causal: bool, masked: bool) -> Callable[[int], Arguments]:
    def build(s: int) -> Arguments:
        return x(3, 4, s, 4), x(3, 4, s, 4), x(3, 4, s, 4), 0.0, causal

    return build


def _flash_for_cpu_backward(s: int) -> Arguments:
    q, k, v = x(3, 4, s, 4), x(3, 4, 5, 4), x(3, 4, 5, 4)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)
    return x(*out.shape), q, k, v, out, lse.contiguous(), 0.0, False


CASES: list[Case] = [
    *[case(autopar_ops.attention.default, build, label) for label, build in FORWARD.items()],
    *[case(autopar_ops.attention_backward.default, _backward(build), label) for label, build in FORWARD.items()],
    *[
        case(autopar_ops.attention_backward_with_mask.default, _backward(build), label)
        for label, build in WITH_MASK_GRADIENT.items()
    ],
    case(aten._scaled_dot_product_flash_attention_for_cpu.default, _flash_for_cpu(False, False)),
    case(aten._scaled_dot_product_flash_attention_for_cpu.default, _flash_for_cpu(True, False), "causal"),
    case(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, _flash_for_cpu_backward),
]
