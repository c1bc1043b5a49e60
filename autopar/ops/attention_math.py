"""Attention on plain tensors: the reference that every kernel is compared with.

Two ways to the same numbers: torch's CPU flash kernels where they apply (no dropout, no cut causal mask, one head
size), else the formulas written out with the logsumexp, in fp32 at least. Shapes: query (B, H, S, D), key
(B, G, T, D), value (B, G, T, E) with G dividing H (grouped-query), out (B, H, S, E), logsumexp (B, H, S). Outputs
and gradients lie in memory as (B, S, H, D), as flash kernels write them, so that the following reshape is a view.
A row that attends to nothing gives zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the scores go through.

    mask: added to the scores, or bool with True = attend; broadcastable to (B, H, S, T). visible: bool, which
        pairs the causal mask of a cut sequence leaves. kept: bool (B, H, S, T), the dropout mask.
    """

    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    visible: Tensor | None = None
    kept: Tensor | None = None
    dropout_p: float = 0.0


def attend(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(out, logsumexp)."""
    heads = query.shape[1]
    key, value = _repeat_heads(key, heads), _repeat_heads(value, heads)
    if _flash_applies(query, value, options):
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_dense, (query, key, value)), 0.0, options.is_causal,
            attn_mask=_additive(options.mask, query.dtype), scale=options.scale,
        )  # fmt: skip
        return store_by_sequence(out), logsumexp.contiguous()
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
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; those of shared heads are summed."""
    heads, groups = query.shape[1], key.shape[1]
    key, value = _repeat_heads(key, heads), _repeat_heads(value, heads)
    if _flash_applies(query, value, options):
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(_dense, (grad_out, query, key, value, out)), logsumexp, 0.0, options.is_causal,
            attn_mask=_additive(options.mask, query.dtype), scale=options.scale,
        )  # fmt: skip
    else:
        grads = _backward_formulas(grad_out, query, key, value, out, logsumexp, options)
    grad_query, grad_key, grad_value = grads
    return (
        store_by_sequence(grad_query),
        store_by_sequence(_sum_heads(grad_key, groups)),
        store_by_sequence(_sum_heads(grad_value, groups)),
    )


def store_by_sequence(x: Tensor) -> Tensor:
    """The same values, contiguous in memory as (B, S, H, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _backward_formulas(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = _weights(_scores(query, key, options), logsumexp)
    wide = weights.dtype
    grad = grad_out.to(wide)
    grad_value = _drop(weights, options).transpose(-1, -2) @ grad
    grad_weights = _drop(grad @ value.to(wide).transpose(-1, -2), options)
    row_sums = (grad * out.to(wide)).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - row_sums) * _scale(query, options)
    grad_query = grad_scores @ key.to(wide)
    grad_key = grad_scores.transpose(-1, -2) @ query.to(wide)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _flash_applies(query: Tensor, value: Tensor, options: Options) -> bool:
    mask = options.mask
    plain_mask = mask is None or (mask.dim() in (2, 4) and mask.dtype != torch.bool and not options.is_causal)
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
    return x if x.stride(-1) == 1 else x.contiguous()


def _scores(query: Tensor, key: Tensor, options: Options) -> Tensor:
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


def _drop(weights: Tensor, options: Options) -> Tensor:
    if options.kept is None:
        return weights
    return weights * options.kept / max(1.0 - options.dropout_p, torch.finfo(weights.dtype).tiny)


def _scale(query: Tensor, options: Options) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if options.scale is None else options.scale


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_heads(grad: Tensor, groups: int) -> Tensor:
    batch, heads, *rest = grad.shape
    return grad if heads == groups else grad.reshape(batch, groups, heads // groups, *rest).sum(2)
