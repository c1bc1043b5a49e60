"""Attention as one operator, with its logsumexp: captured on any machine, its kernel picked at run time.

Capture replaces `torch.nn.functional.scaled_dot_product_attention` by `autopar::attention`; masks mean what they mean
there, and with a window row i sees keys j with |i - j| < window only. Lowering calls `attention_by_index` where a rank
must know the global index of its rows and columns: for dropout, and for the causal mask or the window of a cut
sequence. A mask that needs a gradient (a learned position or pair bias) is differentiated by
`autopar::attention_backward_with_mask`. Any number of batch dims may stand before the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ops.attention_formulas import Draws, ScoreOptions, empty_by_sequence
from autopar.ops.attention_math import (
    attend,
    attend_backward,
    attend_backward_with_mask,
)
from autopar.ops.random_index import Runs, full_runs, reference_seed


def attention_by_index(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    salt: int,
    seed: Tensor | None,
    runs: Runs,
    shape: Sequence[int],
    *,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, logsumexp) of a local block of the scores of global `shape` (..., H, S, T).

    runs: per dim of the scores, the runs of global indices that this rank holds; seed: 0-dim int64 tensor, needed
    only with dropout.
    """
    options = _options(mask, dropout_p, is_causal, scale, salt, seed, runs, shape, window)
    return attend(query, key, value, options)


def attention_backward_by_index(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    salt: int,
    seed: Tensor | None,
    runs: Runs,
    shape: Sequence[int],
    *,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad_query, grad_key, grad_value) of the same local block as `attention_by_index`."""
    options = _options(mask, dropout_p, is_causal, scale, salt, seed, runs, shape, window)
    return attend_backward(grad_out, query, key, value, out, logsumexp, options)


def attention_backward_with_mask_by_index(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    salt: int,
    seed: Tensor | None,
    runs: Runs,
    shape: Sequence[int],
    *,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(grad_query, grad_key, grad_value, grad_mask) of the same local block as `attention_by_index`."""
    options = _options(mask, dropout_p, is_causal, scale, salt, seed, runs, shape, window)
    return attend_backward_with_mask(grad_out, query, key, value, out, logsumexp, options)


def _options(
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    salt: int,
    seed: Tensor | None,
    runs: Runs,
    shape: Sequence[int],
    window: int | None,
) -> ScoreOptions:
    draws = None
    if dropout_p > 0.0:
        assert seed is not None, "attention with dropout needs the seed"
        draws = Draws(shape, runs, seed, salt)
    return ScoreOptions(
        mask=mask,
        is_causal=is_causal,
        window=window,
        scale=scale,
        rows=runs[-2],
        keys=runs[-1],
        draws=draws,
        dropout_p=dropout_p,
    )


def _whole(query: Tensor, key: Tensor, dropout_p: float) -> tuple[Tensor | None, Runs, tuple[int, ...]]:
    shape = (*query.shape[:-1], key.shape[-2])
    seed = reference_seed(query.device) if dropout_p > 0.0 else None
    return seed, full_runs(shape), shape


@torch.library.custom_op(
    "autopar::attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout_p, bool is_causal, float? scale,"
    " int salt, int? window=None) -> (Tensor, Tensor)",
)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    salt: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, logsumexp): softmax(query key^T scale + mask) value, with dropout on the weights.

    query (..., H, S, D), key (..., G, T, D), value (..., G, T, E), G divides H; logsumexp (..., H, S) in fp32 (fp64
    for fp64). Dropout draws by element index from torch's initial seed.
    """
    whole = _whole(query, key, dropout_p)
    return attention_by_index(query, key, value, mask, dropout_p, is_causal, scale, salt, *whole, window=window)


@attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    salt: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = empty_by_sequence(query, (*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=wide)


@torch.library.custom_op(
    "autopar::attention_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor out, Tensor logsumexp,"
    " float dropout_p, bool is_causal, float? scale, int salt, int? window=None) -> (Tensor, Tensor, Tensor)",
)
def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    salt: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad_query, grad_key, grad_value) of `attention`, computed from the saved logsumexp."""
    whole = _whole(query, key, dropout_p)
    return attention_backward_by_index(
        grad_out, query, key, value, mask, out, logsumexp, dropout_p, is_causal, scale, salt, *whole, window=window
    )


@attention_backward.register_fake
def _(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    salt: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        empty_by_sequence(query, query.shape),
        empty_by_sequence(key, key.shape),
        empty_by_sequence(value, value.shape),
    )


@torch.library.custom_op(
    "autopar::attention_backward_with_mask",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor mask, Tensor out, Tensor logsumexp,"
    " float dropout_p, bool is_causal, float? scale, int salt, int? window=None) -> (Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward_with_mask(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    salt: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attention_backward` and the gradient of an additive mask, summed over the dims along which it broadcasts."""
    whole = _whole(query, key, dropout_p)
    return attention_backward_with_mask_by_index(
        grad_out, query, key, value, mask, out, logsumexp, dropout_p, is_causal, scale, salt, *whole, window=window
    )


@attention_backward_with_mask.register_fake
def _(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    salt: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = [empty_by_sequence(x, x.shape) for x in (query, key, value)]
    return grads[0], grads[1], grads[2], mask.new_empty(mask.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, *ctx.options = inputs
    out, logsumexp = output
    ctx.save_for_backward(query, key, value, mask, out, logsumexp)
    ctx.mark_non_differentiable(logsumexp)


def _backward(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, mask, out, logsumexp = ctx.saved_tensors
    operands = (grad_out, query, key, value, mask, out, logsumexp, *ctx.options)
    if ctx.needs_input_grad[3]:
        return (*attention_backward_with_mask(*operands), *(None,) * 5)
    return (*attention_backward(*operands), *(None,) * 6)


attention.register_autograd(_backward, setup_context=_save)
