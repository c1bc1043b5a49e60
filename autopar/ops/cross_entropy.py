"""Cross-entropy of rows of logits of which a rank holds a block of the vocabulary: one pass forward, one backward.

    log_probability, top, log_total = cross_entropy(logits, target)           as programs are planned; on a rank:

    maximum, total, picked = cross_entropy_rows(logits, target, start)        this rank's block, read once
    top = all_reduce(maximum, "max")
    total = all_reduce(rescaled_total(total, maximum, top), "sum")            log z = top + log(total)
    loss = all_reduce(-log_probability(picked, target, top, log(total), start, width))
    grad = cross_entropy_backward(logits, target, top, log(total), scale, start)   read once, written once

`start` is the first vocabulary index of the block; a target outside of it (also -100, an ignored label) picks nothing.
`scale` (N,) is the gradient of each row's loss, 0 for ignored rows. Logits (N, V) of any floating dtype, their rows
perhaps parts of longer ones, statistics (N) in fp32 (fp64 for fp64). The gradient has `columns` columns where they are
given, zeros behind V: products of aligned rows are faster. The bodies are the reference. Source: Megatron-LM's
vocabulary-parallel cross-entropy, with the online sum of "Online normalizer calculation for softmax" (arXiv 1805.02867)
in the first pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

ALIGNED_BYTES = 16
"""What tensor cores want of the rows of a product: on an H100 one of 16384 x 768 by 50257 words in bf16 runs at 97
TFLOP/s, where aligned ones reach 700 (`benchmarks/results/gpu/kernels.json`)."""


def aligned_columns(width: int, dtype: torch.dtype) -> int:
    """So many columns or more, until their rows are aligned; only narrow dtypes run on tensor cores.

    aligned_columns(50257, torch.bfloat16) = 50264     aligned_columns(50257, torch.float32) = 50257
    """
    multiple = ALIGNED_BYTES // dtype.itemsize if dtype.itemsize < 4 else 1
    return -(-width // multiple) * multiple


def cross_entropy_rows_reference(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum, sum of exp(logit - maximum), logit at the target or 0 where it lies outside), each (N)."""
    wide, width = _wide(logits), logits.shape[1]
    maximum = wide.amax(1) if width else wide.new_full(logits.shape[:1], -math.inf)
    total = (wide - _finite(maximum).unsqueeze(1)).exp().sum(1)
    local, inside = _local(target, start, width)
    picked = wide.gather(1, local.unsqueeze(1)).squeeze(1) if width else torch.zeros_like(maximum)
    return maximum, total, picked.masked_fill(~inside, 0)


def rescaled_total(total: Tensor, maximum: Tensor, top: Tensor) -> Tensor:
    """The sum of exp(logit - top) of a block from its sum of exp(logit - maximum)."""
    return total * (maximum - _finite(top)).exp()


def log_probability(picked: Tensor, target: Tensor, top: Tensor, log_total: Tensor, start: int, width: int) -> Tensor:
    """(N): log of the softmax at the target, 0 where it lies outside of this block of `width` indices."""
    inside = _local(target, start, width)[1]
    return torch.where(inside, picked - top - log_total, 0)


def cross_entropy_backward_reference(
    logits: Tensor, target: Tensor, top: Tensor, log_total: Tensor, scale: Tensor, start: int,
    columns: int | None = None,
) -> Tensor:  # fmt: skip
    """(N, columns or V) in the dtype of `logits`: scale * (softmax - onehot(target)) of this block, then zeros."""
    width = logits.shape[1]
    grad = (_wide(logits) - top.unsqueeze(1) - log_total.unsqueeze(1)).exp()
    local, inside = _local(target, start, width)
    if width:
        grad.scatter_add_(1, local.unsqueeze(1), -inside.to(grad.dtype).unsqueeze(1))
    gradient = (grad * scale.unsqueeze(1)).to(logits.dtype)
    return gradient if columns is None else functional.pad(gradient, (0, columns - width))


def cross_entropy_reference(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log of the softmax at the target, or 0 where it lies outside; maximum; log of the sum of exp(logit - maximum)),
    each (N), of whole rows."""
    maximum, total, picked = cross_entropy_rows_reference(logits, target, 0)
    return row_results(picked, target, maximum, total, 0, logits.shape[1])


def row_results(
    picked: Tensor, target: Tensor, top: Tensor, total: Tensor, start: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `cross_entropy` from what is known of all blocks but `picked`, which is this block's."""
    log_total = total.log()
    return log_probability(picked, target, top, log_total, start, width), top, log_total


def row_statistics(top: Tensor, total: Tensor, picked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three as one value: results of `linear_cross_entropy`, of all blocks."""
    return top, total, picked


def _local(target: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    local = target - start
    inside = (local >= 0) & (local < width)
    return local.masked_fill(~inside, 0), inside


def _finite(maximum: Tensor) -> Tensor:
    """0 for a row of -inf, so that its exp(x - maximum) is 0."""
    return maximum.masked_fill(maximum == -math.inf, 0.0)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


cross_entropy = torch.library.custom_op(
    "autopar::cross_entropy",
    cross_entropy_reference,
    mutates_args=(),
    schema="(Tensor logits, Tensor target) -> (Tensor, Tensor, Tensor)",
)
cross_entropy_rows = torch.library.custom_op(
    "autopar::cross_entropy_rows",
    cross_entropy_rows_reference,
    mutates_args=(),
    schema="(Tensor logits, Tensor target, int start) -> (Tensor, Tensor, Tensor)",
)
cross_entropy_backward = torch.library.custom_op(
    "autopar::cross_entropy_backward",
    cross_entropy_backward_reference,
    mutates_args=(),
    schema="(Tensor logits, Tensor target, Tensor top, Tensor log_total, Tensor scale, int start,"
    " int? columns=None) -> Tensor",
)


@cross_entropy.register_fake
def _(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _per_row(logits)


@cross_entropy_rows.register_fake
def _(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    return _per_row(logits)


def _per_row(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    one, two, three = (logits.new_empty(logits.shape[:1], dtype=wide) for _ in range(3))
    return one, two, three


@cross_entropy_backward.register_fake
def _(
    logits: Tensor, target: Tensor, top: Tensor, log_total: Tensor, scale: Tensor, start: int,
    columns: int | None = None,
) -> Tensor:  # fmt: skip
    return logits.new_empty(logits.shape[0], logits.shape[1] if columns is None else columns)
