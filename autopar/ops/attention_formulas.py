"""Attention written out: the formulas that every kernel is compared with, in fp32 at least.

Shapes: query (..., H, S, D), key (..., H, T, D), value (..., H, T, E), out (..., H, S, E), logsumexp (..., H, S). A row
that attends to nothing gives zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ops.attention_blocks import Band, Run
from autopar.ops.random_index import Runs, keep_mask, run_indices


@dataclass(frozen=True, slots=True)
class Draws:
    """By what dropout draws: the global shape of the scores, the runs of them that are here, seed and salt."""

    shape: Sequence[int]
    runs: Runs
    seed: Tensor
    salt: int

    def kept(self, dropout_p: float) -> Tensor:
        """bool, of the local shape of the scores."""
        return keep_mask(self.shape, dropout_p, self.seed, self.salt, self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """What the scores go through.

    mask: added to the scores, or bool with True = attend; broadcastable to (..., H, S, T). is_causal: row i sees keys
        0..i by global index; window: and keys j with |i - j| < window. rows, keys: the runs of global indices that are
        here; None: all. draws: by what dropout draws with probability `dropout_p`; kept: bool (..., H, S, T), the
        dropout mask in their place.
    """

    mask: Tensor | None = None
    is_causal: bool = False
    window: int | None = None
    scale: float | None = None
    rows: tuple[Run, ...] | None = None
    keys: tuple[Run, ...] | None = None
    draws: Draws | None = None
    kept: Tensor | None = None
    dropout_p: float = 0.0

    @property
    def drops(self) -> bool:
        """Whether weights are dropped."""
        return self.draws is not None or self.kept is not None

    @property
    def hides(self) -> bool:
        """Whether pairs are hidden by their global indices."""
        return self.is_causal or self.window is not None

    @property
    def band(self) -> Band:
        """The keys that a row sees by its global index."""
        return Band.of(self.is_causal, self.window)


def attention_formulas(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    """(out, logsumexp); keys and values may have fewer heads, which are repeated."""
    key, value = (repeat_heads(x, query.shape[-3]) for x in (key, value))
    scores = _scores(query, key, options)
    logsumexp = scores.logsumexp(-1)
    weights = _drop(_weights(scores, logsumexp), options)
    return store_by_sequence((weights @ value.to(weights.dtype)).to(query.dtype)), logsumexp


def empty_by_sequence(like: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor (..., H, S, D) that lies in memory as (..., S, H, D)."""
    *batch, heads, length, size = shape
    return like.new_empty((*batch, length, heads, size)).transpose(-3, -2)


def store_by_sequence(x: Tensor) -> Tensor:
    """The same values, contiguous in memory as (..., S, H, D)."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def backward_formulas(
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
    grad_products = grad_scores * scale_of(query, options)
    grad_query = grad_products @ key.to(wide)
    grad_key = grad_products.transpose(-1, -2) @ query.to(wide)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), grad_scores


def runs_of(query: Tensor, key: Tensor, options: ScoreOptions) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The runs of global indices of rows and keys, those of a whole block where none are given."""
    rows = ((0, query.shape[-2]),) if options.rows is None else options.rows
    keys = ((0, key.shape[-2]),) if options.keys is None else options.keys
    return rows, keys


def visible_pairs(query: Tensor, key: Tensor, options: ScoreOptions) -> Tensor:
    """bool (S, T): which of these rows see which keys by their global indices."""
    rows, keys = (run_indices(runs, query.device) for runs in runs_of(query, key, options))
    return pairs_seen(rows, keys, options.is_causal, options.window)


def pairs_seen(rows: Tensor, keys: Tensor, is_causal: bool, window: int | None) -> Tensor:
    """bool (S, T), of global indices (S,) and (T,)."""
    ahead = keys - rows.unsqueeze(-1)
    seen = ahead <= 0 if is_causal else torch.ones_like(ahead, dtype=torch.bool)
    return seen if window is None else seen & (ahead.abs() < window)


def _scores(query: Tensor, key: Tensor, options: ScoreOptions) -> Tensor:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query.to(wide) @ key.to(wide).transpose(-1, -2)) * scale_of(query, options)
    if options.hides:
        scores = scores.masked_fill(~visible_pairs(query, key, options), -math.inf)
    mask = options.mask
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(wide)


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    finite = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)  # a row that sees nothing: exp(-inf) = 0
    return (scores - finite.to(scores.dtype).unsqueeze(-1)).exp()


def _drop(weights: Tensor, options: ScoreOptions) -> Tensor:
    kept = options.kept
    if kept is None:
        if options.draws is None:
            return weights
        kept = options.draws.kept(options.dropout_p)
    return weights * kept / max(1.0 - options.dropout_p, torch.finfo(weights.dtype).tiny)


def scale_of(query: Tensor, options: ScoreOptions) -> float:
    """The factor of the products: as given, else 1 / sqrt(D)."""
    return 1.0 / math.sqrt(query.shape[-1]) if options.scale is None else options.scale


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(..., G, T, D) -> (..., heads, T, D): each head as often as queries share it."""
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], dim=-3)


def sum_heads(grad: Tensor, groups: int) -> Tensor:
    """(..., H, T, D) -> (..., groups, T, D): the inverse of `repeat_heads`, for gradients."""
    *batch, heads, length, size = grad.shape
    return grad if heads == groups else grad.reshape(*batch, groups, heads // groups, length, size).sum(-3)
