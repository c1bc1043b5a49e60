"""Attention on plain tensors: which kernel computes it.

Three ways to the same numbers: torch's fused kernels of the device where there is one (`attention_kernels`) and nothing
is dropped; on CUDA a kernel of ours for what torch has none (`indexed_attention`); else the formulas written out with
the logsumexp (`attention_formulas`). Of a causal mask and of a window a fused kernel computes the blocks that are seen
(`fused_blocks`).

Shapes: query (..., H, S, D), key (..., G, T, D), value (..., G, T, E) with G dividing H (grouped-query),
out (..., H, S, E), logsumexp (..., H, S), the same batch dims everywhere. Outputs and gradients lie in memory as
(..., S, H, D), as flash kernels write them, so that the following reshape is a view. A row that attends to nothing
gives zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ops.attention_formulas import (
    ScoreOptions,
    attention_formulas,
    backward_formulas,
    repeat_heads,
    runs_of,
    scale_of,
    store_by_sequence,
    sum_heads,
)
from autopar.ops.attention_kernels import FusedKernel, fused_kernel
from autopar.ops.fused_blocks import FusedBlocks
from autopar.ops.indexed_attention import INDEXED_DIMS, indexed_attention, indexed_attention_backward
from autopar.ops.philox import LANES
from autopar.ops.random_index import full_runs, global_index, merge_dims, run_indices


def attend(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    """(out, logsumexp)."""
    kernel = _kernel(query, key, value, options)
    if kernel is not None:
        fused = FusedBlocks.of(kernel, query, key, options)
        out, logsumexp = fused.forward(*map(_one_batch_dim, (query, key, value)))
        out = out.reshape(*query.shape[:-1], value.shape[-1])
        return store_by_sequence(out), logsumexp.reshape(query.shape[:-1]).contiguous()
    if _is_indexed(query, options):
        out, logsumexp = indexed_attention(*_indexed(query, key, value, options))
        return store_by_sequence(out.reshape(*query.shape[:-1], value.shape[-1])), logsumexp.reshape(query.shape[:-1])
    return attention_formulas(query, key, value, options)


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
    kernel = _kernel(query, key, value, options)
    if kernel is not None:
        fused = FusedBlocks.of(kernel, query, key, options)
        sums = logsumexp.reshape(-1, *logsumexp.shape[-2:])
        grad, rows, keys, values, result = map(_one_batch_dim, (grad_out, query, key, value, out))
        grads = fused.backward(grad, rows, keys, values, result, sums)
        return _stored(query, key, value, grads, groups)
    if _is_indexed(query, options):
        ours = _indexed_backward(grad_out, query, key, value, out, logsumexp, options, with_mask=False)
        return _stored(query, key, value, ours[:3], groups)
    keys, values = (repeat_heads(x, heads) for x in (key, value))
    grads = backward_formulas(grad_out, query, keys, values, out, logsumexp, options)[:3]
    return _stored(query, key, value, grads, groups)


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
    mask = options.mask
    assert mask is not None, "an attention without a mask has no gradient of one"
    if _is_indexed(query, options) and not torch.are_deterministic_algorithms_enabled():  # it adds in any order
        *grads, grad_mask = _indexed_backward(grad_out, query, key, value, out, logsumexp, options, with_mask=True)
        return *_stored(query, key, value, grads, groups), grad_mask.reshape(mask.shape)
    keys, values = (repeat_heads(x, heads) for x in (key, value))
    *grads, grad_scores = backward_formulas(grad_out, query, keys, values, out, logsumexp, options)
    return *_stored(query, key, value, grads, groups), grad_scores.sum_to_size(mask.shape).to(mask.dtype)


def _stored(
    query: Tensor, key: Tensor, value: Tensor, grads: Sequence[Tensor], groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients shaped like their tensors, those of shared heads summed, stored by sequence."""
    summed = (grads[0], *(grad if grad.shape[-3] == groups else sum_heads(grad, groups) for grad in grads[1:]))
    found = [store_by_sequence(grad.reshape(x.shape)) for grad, x in zip(summed, (query, key, value), strict=True)]
    return found[0], found[1], found[2]


def _kernel(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> FusedKernel | None:
    if options.drops or min(query.numel(), key.numel(), value.numel()) == 0:
        return None
    mask = options.mask
    if mask is not None and query.dim() > 4 and mask.dim() > 3:
        return None  # a kernel has one batch dim, over which such a mask broadcasts in part
    return fused_kernel(query, value, mask is not None)


def _is_indexed(query: Tensor, options: ScoreOptions) -> bool:
    """Whether the operator with a kernel of ours computes it."""
    if query.device.type != "cuda" or options.kept is not None:
        return False
    mask = options.mask
    return query.dtype != torch.float64 and (mask is None or max(query.dim(), mask.dim()) <= INDEXED_DIMS)


def _indexed(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> tuple[Any, ...]:
    """The operands of `indexed_attention`."""
    inner = query.shape[-4] if query.dim() == INDEXED_DIMS else 1
    mask, draws = options.mask, options.draws
    if mask is not None:
        mask = mask.reshape(*(1,) * (max(query.dim(), 4) - mask.dim()), *mask.shape)
        mask = mask if mask.dim() == INDEXED_DIMS else mask.unsqueeze(1)
    rows, keys = runs_of(query, key, options)
    shape = (*query.shape[:-1], key.shape[-2]) if draws is None else tuple(draws.shape)
    runs = full_runs(shape) if draws is None else draws.runs
    starts = global_index(*merge_dims(shape[:-2], runs[:-2]), query.device, shape[-2] * shape[-1]).reshape(-1)
    row_index = run_indices(rows, query.device)
    aligned = len(keys) == 1 and keys[0][0] % LANES == 0 and shape[-1] % LANES == 0
    return (
        *map(_one_batch_dim, (query, key, value)), mask, inner, options.is_causal, scale_of(query, options),
        row_index, row_index if keys == rows else run_indices(keys, query.device), options.dropout_p if draws else 0.0,
        None if draws is None else draws.seed, 0 if draws is None else draws.salt, starts, shape[-1], aligned,
        options.window,
    )  # fmt: skip


def _indexed_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    options: ScoreOptions, *, with_mask: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, keys, values, mask, *rest, window = _indexed(query, key, value, options)
    grad, result = map(_one_batch_dim, (grad_out, out))
    sums = logsumexp.reshape(-1, *logsumexp.shape[-2:])
    found: tuple[Tensor, ...] = indexed_attention_backward(
        grad, rows, keys, values, mask, result, sums, *rest, with_mask, window
    )
    return found


def _one_batch_dim(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:])


