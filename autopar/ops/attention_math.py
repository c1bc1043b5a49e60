"""Attention on plain tensors: which kernel computes it.

Three ways to the same numbers: torch's fused kernels of the device where there is one (`attention_kernels`) and nothing
is dropped; on CUDA a kernel of ours for what torch has none (`indexed_attention`); else the formulas written out with
the logsumexp (`attention_formulas`). A causal mask is computed as whole and
causal blocks (`attention_blocks`), which are joined by their logsumexp (`merge_blocks`), and whose backward kernels,
given the joined out and logsumexp, return their shares of the gradients.

Shapes: query (..., H, S, D), key (..., G, T, D), value (..., G, T, E) with G dividing H (grouped-query),
out (..., H, S, E), logsumexp (..., H, S), the same batch dims everywhere. Outputs and gradients lie in memory as
(..., S, H, D), as flash kernels write them, so that the following reshape is a view. A row that attends to nothing
gives zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ops.attention_blocks import KeyBlock, RowBlock, causal_blocks
from autopar.ops.attention_formulas import (
    ScoreOptions,
    attention_formulas,
    backward_formulas,
    repeat_heads,
    runs_of,
    scale_of,
    store_by_sequence,
    sum_heads,
    visible_pairs,
)
from autopar.ops.attention_kernels import FusedKernel, Scores, fused_kernel
from autopar.ops.indexed_attention import INDEXED_DIMS, indexed_attention, indexed_attention_backward
from autopar.ops.merge_blocks import merge_blocks
from autopar.ops.philox import LANES
from autopar.ops.random_index import full_runs, global_index, run_indices


def attend(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    """(out, logsumexp)."""
    kernel = _kernel(query, key, value, options)
    if kernel is not None:
        fused = _Fused.of(kernel, query, key, options)
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
        fused = _Fused.of(kernel, query, key, options)
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


@dataclass(frozen=True, slots=True)
class _Fused:
    """Attention of one batch dim by a fused kernel: in one call, or in blocks of a causal mask."""

    kernel: FusedKernel
    scores: Scores
    blocks: tuple[RowBlock, ...] | None

    @staticmethod
    def of(kernel: FusedKernel, query: Tensor, key: Tensor, options: ScoreOptions) -> _Fused:
        """A causal mask beside another one becomes part of it."""
        mask = _one_mask(query, key, options)
        blocks = None
        if options.is_causal and mask is None:
            rows, keys = runs_of(query, key, options)
            blocks = causal_blocks(rows, keys)
        return _Fused(kernel, Scores(scale=scale_of(query, options), mask=mask), blocks)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(out, logsumexp)."""
        if self.blocks is None:
            return self.kernel.forward(query, key, value, self.scores)
        parts = [self._rows(block, query, key, value) for block in self.blocks]
        if len(parts) == 1:
            return parts[0]
        outs, sums = zip(*parts, strict=True)
        return torch.cat(outs, -2), torch.cat(sums, -1)

    def _rows(self, block: RowBlock, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        rows = query[:, :, block.start : block.stop]
        if not block.keys:
            wide = torch.float64 if query.dtype == torch.float64 else torch.float32
            nothing = rows.new_full(rows.shape[:-1], -math.inf, dtype=wide)
            return rows.new_zeros((*rows.shape[:-1], value.shape[-1])), nothing
        found = [self.kernel.forward(rows, _cut(key, keys), _cut(value, keys), self._of(keys)) for keys in block.keys]
        return found[0] if len(found) == 1 else _joined(found)

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, from the whole out and logsumexp."""
        if self.blocks is None:
            return self.kernel.backward(grad_out, query, key, value, out, logsumexp, self.scores)
        wholly = len(self.blocks) == 1 and len(self.blocks[0].keys) == 1
        if wholly and self.blocks[0].keys[0].stop - self.blocks[0].keys[0].start == key.shape[-2]:
            scores = self._of(self.blocks[0].keys[0])
            return self.kernel.backward(grad_out, query, key, value, out, logsumexp, scores)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        sums = [torch.zeros_like(x, dtype=wide) for x in (query, key, value)]
        for block in self.blocks:
            rows = slice(block.start, block.stop)
            here = [x[:, :, rows] for x in (grad_out, query, out, logsumexp)]
            for keys in block.keys:
                found = self.kernel.backward(
                    here[0], here[1], _cut(key, keys), _cut(value, keys), here[2], here[3], self._of(keys)
                )
                sums[0][:, :, rows].add_(found[0])
                for total, part in zip(sums[1:], found[1:], strict=True):
                    _cut(total, keys).add_(part)
        return sums[0].to(query.dtype), sums[1].to(key.dtype), sums[2].to(value.dtype)

    def _of(self, keys: KeyBlock) -> Scores:
        return Scores(scale=self.scores.scale, is_causal=keys.is_causal)


def _cut(x: Tensor, keys: KeyBlock) -> Tensor:
    return x[:, :, keys.start : keys.stop]


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(out, logsumexp) over all keys, of those over some; rounded once."""
    (out, logsumexp), *others = parts
    dtype = out.dtype
    if len(others) > 1:
        out = out.to(logsumexp.dtype)
    for other in others:
        out, logsumexp = merge_blocks(out, logsumexp, *other)
    return out.to(dtype), logsumexp


def _kernel(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> FusedKernel | None:
    if options.drops or min(query.numel(), key.numel(), value.numel()) == 0:
        return None
    mask = options.mask
    if mask is not None and query.dim() > 4 and mask.dim() > 3:
        return None  # a kernel has one batch dim, over which such a mask broadcasts in part
    return fused_kernel(query, value, mask is not None)


def _one_mask(query: Tensor, key: Tensor, options: ScoreOptions) -> Tensor | None:
    """The mask in the dtype of the operands, added to the scores, with the causal one in it."""
    mask = options.mask
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        seen = mask & visible_pairs(query, key, options) if options.is_causal else mask
        return torch.zeros(seen.shape, dtype=query.dtype, device=mask.device).masked_fill_(~seen, -math.inf)
    mask = mask.to(query.dtype)
    return mask.masked_fill(~visible_pairs(query, key, options), -math.inf) if options.is_causal else mask


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
    starts = global_index(shape[:-2], runs[:-2], query.device).reshape(-1) * (shape[-2] * shape[-1])
    aligned = len(keys) == 1 and keys[0][0] % LANES == 0 and shape[-1] % LANES == 0
    return (
        *map(_one_batch_dim, (query, key, value)), mask, inner, options.is_causal, scale_of(query, options),
        run_indices(rows, query.device), run_indices(keys, query.device), options.dropout_p if draws else 0.0,
        None if draws is None else draws.seed, 0 if draws is None else draws.salt, starts, shape[-1], aligned,
    )  # fmt: skip


def _indexed_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    options: ScoreOptions, *, with_mask: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, keys, values, mask, *rest = _indexed(query, key, value, options)
    grad, result = map(_one_batch_dim, (grad_out, out))
    sums = logsumexp.reshape(-1, *logsumexp.shape[-2:])
    found: tuple[Tensor, ...] = indexed_attention_backward(
        grad, rows, keys, values, mask, result, sums, *rest, with_mask
    )
    return found


def _one_batch_dim(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:])


