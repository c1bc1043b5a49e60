"""Attention on plain tensors: the reference that every kernel is compared with.

Two ways to the same numbers: torch's CPU flash kernels where they apply (no dropout, no cut causal mask, one head
size), else the formulas written out with the logsumexp, in fp32 at least. Shapes: query (..., H, S, D), key
(..., G, T, D), value (..., G, T, E) with G dividing H (grouped-query), out (..., H, S, E), logsumexp (..., H, S), the
same batch dims everywhere. Outputs and gradients lie in memory as (..., S, H, D), as flash kernels write them, so
that the following reshape is a view. A row that attends to nothing gives zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """What the scores go through.

    mask: added to the scores, or bool with True = attend; broadcastable to (..., H, S, T). visible: bool, which
        pairs the causal mask of a cut sequence leaves. kept: bool (..., H, S, T), the dropout mask.
    """

    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    visible: Tensor | None = None
    kept: Tensor | None = None
    dropout_p: float = 0.0


def attend(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    """(out, logsumexp)."""
    heads = query.shape[-3]
    key, value = _repeat_heads(key, heads), _repeat_heads(value, heads)
    if _flash_applies(query, value, options):
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_dense, (query, key, value)), 0.0, options.is_causal,
            attn_mask=_additive(options.mask, query.dtype), scale=options.scale,
        )  # fmt: skip
        out = out.reshape(*query.shape[:-1], value.shape[-1])
        return store_by_sequence(out), logsumexp.reshape(query.shape[:-1]).contiguous()
    scores = _scores(query, key, options)
    logsumexp = scores.logsumexp(-1)
    weights = _drop(_weights(scores, logsumexp), options)
    return store_by_sequence((weights @ value.to(weights.dtype)).to(query.dtype)), logsumexp


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    options: ScoreOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; those of shared heads are summed."""
    heads, groups = query.shape[-3], key.shape[-3]
    key, value = _repeat_heads(key, heads), _repeat_heads(value, heads)
    if _flash_applies(query, value, options):
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(_dense, (grad_out, query, key, value, out)), logsumexp.reshape(-1, *logsumexp.shape[-2:]), 0.0,
            options.is_causal, attn_mask=_additive(options.mask, query.dtype), scale=options.scale,
        )  # fmt: skip
        return _stored(query, key, value, grads, groups)
    grads = _backward_formulas(grad_out, query, key, value, out, logsumexp, options)
    return _stored(query, key, value, grads[:3], groups)


def attend_backward_with_mask(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    options: ScoreOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and of the additive mask, summed over the dims along which it broadcasts."""
    heads, groups = query.shape[-3], key.shape[-3]
    key, value = _repeat_heads(key, heads), _repeat_heads(value, heads)
    *grads, grad_scores = _backward_formulas(grad_out, query, key, value, out, logsumexp, options)
    mask = options.mask
    assert mask is not None, "an attention without a mask has no gradient of one"
    return *_stored(query, key, value, grads, groups), grad_scores.sum_to_size(mask.shape).to(mask.dtype)


def _stored(
    query: Tensor, key: Tensor, value: Tensor, grads: Sequence[Tensor], groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients shaped like their tensors, those of shared heads summed, stored by sequence."""
    grad_query, grad_key, grad_value = (g.reshape(x.shape) for g, x in zip(grads, (query, key, value), strict=True))
    return (
        store_by_sequence(grad_query),
        store_by_sequence(_sum_heads(grad_key, groups)),
        store_by_sequence(_sum_heads(grad_value, groups)),
    )


def store_by_sequence(x: Tensor) -> Tensor:
    """The same values, contiguous in memory as (..., S, H, D)."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def _backward_formulas(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    options: ScoreOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and of the scores (those in the dtype of the sums)."""
    weights = _weights(_scores(query, key, options), logsumexp)
    wide = weights.dtype
    grad = grad_out.to(wide)
    grad_value = _drop(weights, options).transpose(-1, -2) @ grad
    grad_weights = _drop(grad @ value.to(wide).transpose(-1, -2), options)
    row_sums = (grad * out.to(wide)).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - row_sums)
    grad_products = grad_scores * _scale(query, options)
    grad_query = grad_products @ key.to(wide)
    grad_key = grad_products.transpose(-1, -2) @ query.to(wide)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_scores


def _flash_applies(query: Tensor, value: Tensor, options: ScoreOptions) -> bool:
    mask = options.mask
    ranks = (2, 4) if query.dim() == 4 else (2,)  # the kernel takes one batch dim; a mask of two dims fits any
    plain_mask = mask is None or (mask.dim() in ranks and mask.dtype != torch.bool and not options.is_causal)
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1]
        and min(query.numel(), value.numel()) > 0
        and options.kept is None
        and options.visible is None
        and plain_mask
    )


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if mask is None else mask.to(dtype)


def _dense(x: Tensor) -> Tensor:
    """With one batch dim and a dense last dim, as the kernel wants it."""
    x = x.reshape(-1, *x.shape[-3:])
    return x if x.stride(-1) == 1 else x.contiguous()


def _scores(query: Tensor, key: Tensor, options: ScoreOptions) -> Tensor:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query.to(wide) @ key.to(wide).transpose(-1, -2)) * _scale(query, options)
    visible = options.visible
    if visible is None and options.is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    mask = options.mask
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(wide)


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    finite = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)  # a row that sees nothing: exp(-inf) = 0
    return (scores - finite.to(scores.dtype).unsqueeze(-1)).exp()


def _drop(weights: Tensor, options: ScoreOptions) -> Tensor:
    if options.kept is None:
        return weights
    return weights * options.kept / max(1.0 - options.dropout_p, torch.finfo(weights.dtype).tiny)


def _scale(query: Tensor, options: ScoreOptions) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if options.scale is None else options.scale


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], dim=-3)


def _sum_heads(grad: Tensor, groups: int) -> Tensor:
    *batch, heads, length, size = grad.shape
    return grad if heads == groups else grad.reshape(*batch, groups, heads // groups, length, size).sum(-3)
