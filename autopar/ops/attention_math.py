"""Attention on plain tensors: the reference that every kernel is compared with.

Two ways to the same numbers: torch's fused kernels of the device where there is one (`attention_kernels`) and nothing
is dropped, else the formulas written out with the logsumexp, in fp32 at least. A causal mask is computed as whole and
causal blocks (`attention_blocks`), which are joined by their logsumexp:

    out = sum of out_i exp(logsumexp_i - logsumexp),    logsumexp = log of the sum of exp(logsumexp_i)

and whose backward kernels, given the joined out and logsumexp, return their shares of the gradients.

Shapes: query (..., H, S, D), key (..., G, T, D), value (..., G, T, E) with G dividing H (grouped-query),
out (..., H, S, E), logsumexp (..., H, S), the same batch dims everywhere. Outputs and gradients lie in memory as
(..., S, H, D), as flash kernels write them, so that the following reshape is a view. A row that attends to nothing
gives zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ops.attention_blocks import KeyBlock, RowBlock, Run, causal_blocks
from autopar.ops.attention_kernels import FusedKernel, Scores, fused_kernel
from autopar.ops.random_index import run_indices


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """What the scores go through.

    mask: added to the scores, or bool with True = attend; broadcastable to (..., H, S, T). is_causal: row i sees keys
        0..i by global index. rows, keys: the runs of global indices that are here; None: all. kept: bool
        (..., H, S, T), the dropout mask.
    """

    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    rows: tuple[Run, ...] | None = None
    keys: tuple[Run, ...] | None = None
    kept: Tensor | None = None
    dropout_p: float = 0.0


def attend(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> tuple[Tensor, Tensor]:
    """(out, logsumexp)."""
    kernel = _kernel(query, key, value, options)
    if kernel is not None:
        fused = _Fused.of(kernel, query, key, options)
        out, logsumexp = fused.forward(*map(_one_batch_dim, (query, key, value)))
        out = out.reshape(*query.shape[:-1], value.shape[-1])
        return store_by_sequence(out), logsumexp.reshape(query.shape[:-1]).contiguous()
    key, value = (_repeat_heads(x, query.shape[-3]) for x in (key, value))
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
    kernel = _kernel(query, key, value, options)
    if kernel is not None:
        fused = _Fused.of(kernel, query, key, options)
        sums = logsumexp.reshape(-1, *logsumexp.shape[-2:])
        grad, rows, keys, values, result = map(_one_batch_dim, (grad_out, query, key, value, out))
        grads = fused.backward(grad, rows, keys, values, result, sums)
        return _stored(query, key, value, grads, groups)
    keys, values = (_repeat_heads(x, heads) for x in (key, value))
    grads = _backward_formulas(grad_out, query, keys, values, out, logsumexp, options)[:3]
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
    keys, values = (_repeat_heads(x, heads) for x in (key, value))
    *grads, grad_scores = _backward_formulas(grad_out, query, keys, values, out, logsumexp, options)
    mask = options.mask
    assert mask is not None, "an attention without a mask has no gradient of one"
    return *_stored(query, key, value, grads, groups), grad_scores.sum_to_size(mask.shape).to(mask.dtype)


def _stored(
    query: Tensor, key: Tensor, value: Tensor, grads: Sequence[Tensor], groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients shaped like their tensors, those of shared heads summed, stored by sequence."""
    summed = (grads[0], *(grad if grad.shape[-3] == groups else _sum_heads(grad, groups) for grad in grads[1:]))
    found = [store_by_sequence(grad.reshape(x.shape)) for grad, x in zip(summed, (query, key, value), strict=True)]
    return found[0], found[1], found[2]


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
            rows, keys = _runs(query, key, options)
            blocks = causal_blocks(rows, keys)
        return _Fused(kernel, Scores(scale=_scale(query, options), mask=mask), blocks)

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
    """(out, logsumexp) over all keys, of those over some."""
    logsumexp = torch.stack([sums for _, sums in parts]).logsumexp(0)
    out = torch.zeros_like(parts[0][0], dtype=logsumexp.dtype)
    for part, sums in parts:
        out.addcmul_(part.to(out.dtype), (sums - logsumexp).exp().unsqueeze(-1))
    return out.to(parts[0][0].dtype), logsumexp


def _kernel(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> FusedKernel | None:
    if options.kept is not None or min(query.numel(), key.numel(), value.numel()) == 0:
        return None
    mask = options.mask
    if mask is not None and query.dim() > 4 and mask.dim() > 3:
        return None  # a kernel has one batch dim, over which such a mask broadcasts in part
    return fused_kernel(query, value, mask is not None)


def _runs(query: Tensor, key: Tensor, options: ScoreOptions) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    rows = ((0, query.shape[-2]),) if options.rows is None else options.rows
    keys = ((0, key.shape[-2]),) if options.keys is None else options.keys
    return rows, keys


def _visible(query: Tensor, key: Tensor, options: ScoreOptions) -> Tensor:
    """bool (S, T): the causal mask of these rows and keys."""
    rows, keys = (run_indices(runs, query.device) for runs in _runs(query, key, options))
    return keys <= rows.unsqueeze(-1)


def _one_mask(query: Tensor, key: Tensor, options: ScoreOptions) -> Tensor | None:
    """The mask in the dtype of the operands, added to the scores, with the causal one in it."""
    mask = options.mask
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        seen = mask & _visible(query, key, options) if options.is_causal else mask
        return torch.zeros(seen.shape, dtype=query.dtype, device=mask.device).masked_fill_(~seen, -math.inf)
    mask = mask.to(query.dtype)
    return mask.masked_fill(~_visible(query, key, options), -math.inf) if options.is_causal else mask


def _one_batch_dim(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:])


def _scores(query: Tensor, key: Tensor, options: ScoreOptions) -> Tensor:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query.to(wide) @ key.to(wide).transpose(-1, -2)) * _scale(query, options)
    if options.is_causal:
        scores = scores.masked_fill(~_visible(query, key, options), -math.inf)
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
