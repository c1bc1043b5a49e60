"""Attention that knows the global index of its rows and keys, as one operator that has a kernel of ours on CUDA.

It stands where torch has no fused kernel: dropout by global element index, a mask over some of several batch dims, the
gradient of a mask. The references write the scores out; `runtime/kernels/triton_attention.py` computes the same in
tiles.

Shapes: query (B, H, S, D), key (B, G, T, D), value (B, G, T, E), G dividing H, of any strides; mask None, or bool
(True: attend) or added, of shape (outer, inner, H, S, T) with B = outer * inner, 1 along dims over which it broadcasts;
rows (S,), keys (T,): int64 global indices; starts (B * H,): number of element (0, 0) of each matrix of scores among
all, int64; width: keys of the whole matrix. Element (i, j) has the number starts + rows[i] * width + keys[j], by which
dropout draws. aligned: keys are neighbours and every row begins at a multiple of 4, so that four share a counter.
window: pairs with |row - key| < window are there, no others. The output and the gradients of query, key and value lie
in memory as (B, S, H, E).
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ops.attention_formulas import (
    ScoreOptions,
    attention_formulas,
    backward_formulas,
    empty_by_sequence,
    pairs_seen,
    repeat_heads,
    store_by_sequence,
    sum_heads,
)
from autopar.ops.philox import LANES, philox
from autopar.ops.random_index import drop_threshold

INDEXED_DIMS = 5
"""Dims of a mask: two batch dims, heads, rows, keys."""


def indexed_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, inner: int, is_causal: bool, scale: float,
    rows: Tensor, keys: Tensor, dropout_p: float, seed: Tensor | None, salt: int, starts: Tensor, width: int,
    aligned: bool, window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out (B, H, S, E), logsumexp (B, H, S) in fp32)."""
    options = _options(query, mask, inner, is_causal, scale, rows, keys, dropout_p, seed, salt, starts, width, window)
    query, key, value = (_outer(x, inner) for x in (query, key, value))
    out, logsumexp = attention_formulas(query, key, value, options)
    return store_by_sequence(out.flatten(0, 1)), logsumexp.flatten(0, 1).float()


def indexed_attention_backward_reference(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor, logsumexp: Tensor,
    inner: int, is_causal: bool, scale: float, rows: Tensor, keys: Tensor, dropout_p: float, seed: Tensor | None,
    salt: int, starts: Tensor, width: int, aligned: bool, with_mask: bool, window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value and, where `with_mask`, of the mask, in its shape; else an empty tensor."""
    options = _options(query, mask, inner, is_causal, scale, rows, keys, dropout_p, seed, salt, starts, width, window)
    groups = key.shape[1]
    grad, query, result, sums = (_outer(x, inner) for x in (grad, query, out, logsumexp))
    key, value = (repeat_heads(_outer(x, inner), query.shape[-3]) for x in (key, value))
    *grads, of_scores = backward_formulas(grad, query, key, value, result, sums, options)
    of_query, of_key, of_value = (x.flatten(0, 1) for x in grads)
    of_mask = query.new_empty(0)
    if with_mask and mask is not None:
        of_mask = of_scores.sum_to_size(mask.shape).to(mask.dtype)
    summed = (of_query, sum_heads(of_key, groups), sum_heads(of_value, groups))
    of_query, of_key, of_value = (store_by_sequence(x) for x in summed)
    return of_query, of_key, of_value, of_mask


def _outer(x: Tensor, inner: int) -> Tensor:
    """(B, ...) as (outer, inner, ...)."""
    return x.reshape(-1, inner, *x.shape[1:])


def _options(
    query: Tensor, mask: Tensor | None, inner: int, is_causal: bool, scale: float, rows: Tensor, keys: Tensor,
    dropout_p: float, seed: Tensor | None, salt: int, starts: Tensor, width: int, window: int | None,
) -> ScoreOptions:  # fmt: skip
    """What the scores go through, what indices hide as part of the mask."""
    if is_causal or window is not None:
        seen = pairs_seen(rows, keys, is_causal, window)
        if mask is None:
            mask = seen
        else:
            mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
    kept = None
    if dropout_p > 0.0:
        assert seed is not None, "dropout needs the seed"
        numbers = starts[:, None, None] + rows[None, :, None] * width + keys[None, None, :]
        words = philox((numbers // LANES).reshape(-1), salt, 0, seed)
        words = words.gather(1, (numbers % LANES).reshape(-1, 1)).reshape(numbers.shape)
        kept = _outer((words >= drop_threshold(dropout_p)).reshape(*query.shape[:2], *words.shape[1:]), inner)
    return ScoreOptions(mask=mask, scale=scale, kept=kept, dropout_p=dropout_p)


_OPTIONS = "Tensor? seed, int salt, Tensor starts, int width, bool aligned"
_CALL = f"int inner, bool is_causal, float scale, Tensor rows, Tensor keys, float dropout_p, {_OPTIONS}"
_WITH_MASK = 2 + len(_CALL.split(","))
"""Place of `with_mask` behind the mask: out, logsumexp and what a call takes stand before it."""

indexed_attention = torch.library.custom_op(
    "autopar::indexed_attention",
    indexed_attention_reference,
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? mask, {_CALL}, int? window=None) -> (Tensor, Tensor)",
)
indexed_attention_backward = torch.library.custom_op(
    "autopar::indexed_attention_backward",
    indexed_attention_backward_reference,
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor out, Tensor logsumexp, "
    f"{_CALL}, bool with_mask, int? window=None) -> (Tensor, Tensor, Tensor, Tensor)",
)


@indexed_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    out = empty_by_sequence(query, (*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@indexed_attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with_mask = options[_WITH_MASK]
    of_mask = mask.new_empty(mask.shape) if with_mask and mask is not None else query.new_empty(0)
    of_query, of_key, of_value = (empty_by_sequence(x, x.shape) for x in (query, key, value))
    return of_query, of_key, of_value, of_mask
