"""The last product of a language model and its cross-entropy, in chunks of rows: all logits never exist at once.

    logits = hidden @ weight.t(); maximum, total, picked = cross_entropy_rows(logits, target, start)
        -->   maximum, total, picked = linear_cross_entropy(hidden, weight, target, start)
    grad = cross_entropy_backward(logits, ...); grad_hidden = grad @ weight; grad_weight = grad.t() @ hidden
        -->   grad_hidden, grad_weight = linear_cross_entropy_backward(hidden, weight, target, ...)

A rank may hold a block of the vocabulary: what it all-reduces in between is that of `cross_entropy_rows`. Backward
computes the logits of a chunk again and writes their gradient over them. One buffer holds the logits of every chunk in
turn (`chunk_rows`); narrow gradients of weight are added up in fp32, which backward holds beside it.

On tensor cores products of rows that are not aligned are several times slower, so that weight and the buffer are filled
up to a multiple of 16 bytes with words that nobody counts (`aligned_columns`).

hidden (N, K), weight (V, K) as nn.Linear has it, target (N) int64, statistics (N) in fp32 (fp64 for fp64). Logits have
the dtype of hidden, as the product has. Source: FusedLinearCrossEntropy of Liger Kernel (arXiv 2410.10989), which has
smaller chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from autopar.ops.cross_entropy import aligned_columns, cross_entropy_backward_reference, cross_entropy_rows_reference

LEAST_ROWS = 4096
"""Of a chunk. With fewer, adding the bf16 gradient of weight to its total (12 V K bytes a chunk) takes more than a
seventh of the seconds of backward's three products (6 rows V K operations), at 3.35 TB/s and 989 TFLOP/s (H100-SXM)."""
MULTIPLE = 128
"""Of rows that tiles of products have."""


def chunk_rows(rows: int, words: int, width: int) -> int:
    """Rows of a chunk of hidden (rows, width) for weight (words, width).

    The logits of a chunk have about as many elements as the larger of hidden and weight, or `LEAST_ROWS` rows. Chunks
    are equal but for the last one, in multiples of `MULTIPLE` rows.

        chunk_rows(65536, 128256, 8192) = 8192     chunk_rows(32768, 50257, 768) = 4096     chunk_rows(100, 50, 8) = 128
    """
    return equal_chunks(rows, max(LEAST_ROWS, width, rows * width // max(words, 1)))


def equal_chunks(rows: int, most: int) -> int:
    """Rows of each of the fewest equal chunks of at most about so many rows: a multiple of `MULTIPLE`."""
    chunks = max(1, math.ceil(rows / most))
    return max(1, math.ceil(rows / chunks / MULTIPLE)) * MULTIPLE


def rows_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    start: int,
    statistics: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """`linear_cross_entropy` by an implementation of `cross_entropy_rows`."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    found = [hidden.new_empty(hidden.shape[:1], dtype=wide) for _ in range(3)]
    words = weight.shape[0]
    for rows, logits in _chunks(hidden, _aligned(weight)):
        logits = logits[:, :words]
        for whole, part in zip(found, statistics(logits, target[rows], start), strict=True):
            whole[rows] = part
    return found[0], found[1], found[2]


def gradients_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    top: Tensor,
    log_total: Tensor,
    scale: Tensor,
    start: int,
    overwrite: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, Tensor], object],
) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy_backward` by what writes the gradient of logits over them: its last argument is the buffer
    that they are part of, which it fills."""
    words, weight = weight.shape[0], _aligned(weight)
    grad_hidden, grad_weight = hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)
    adds_itself = weight.dtype.itemsize >= 4 or chunk_rows(len(hidden), *weight.shape) >= len(hidden)
    total = grad_weight if adds_itself else weight.new_zeros(weight.shape, dtype=torch.float32)
    for rows, logits in _chunks(hidden, weight):
        overwrite(logits[:, :words], target[rows], top[rows], log_total[rows], scale[rows], start, logits)
        torch.mm(logits, weight, out=grad_hidden[rows])
        if adds_itself:
            total.addmm_(logits.t(), hidden[rows], beta=1 if rows.start else 0)
        else:
            total.add_(torch.mm(logits.t(), hidden[rows], out=grad_weight))
    grad_weight = grad_weight if adds_itself else grad_weight.copy_(total)
    return grad_hidden, grad_weight[:words]


def _aligned(weight: Tensor) -> Tensor:
    """With rows of zeros until products of it have aligned rows."""
    further = aligned_columns(weight.shape[0], weight.dtype) - weight.shape[0]
    return functional.pad(weight, (0, 0, 0, further)) if further else weight


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows and their logits, which stand in one buffer one after the other."""
    count, words = hidden.shape[0], weight.shape[0]
    length = chunk_rows(count, *weight.shape)
    buffer = hidden.new_empty(min(length, count), words)
    for first in range(0, max(count, 1), length):
        rows = slice(first, min(first + length, count))
        yield rows, torch.mm(hidden[rows], weight.t(), out=buffer[: rows.stop - first])


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, target: Tensor, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(maximum, sum of exp(logit - maximum), logit at the target or 0 where it lies outside), each (N)."""
    return rows_in_chunks(hidden, weight, target, start, cross_entropy_rows_reference)


def linear_cross_entropy_backward_reference(
    hidden: Tensor, weight: Tensor, target: Tensor, top: Tensor, log_total: Tensor, scale: Tensor, start: int
) -> tuple[Tensor, Tensor]:
    """(gradient of hidden (N, K), of weight (V, K)) in their dtypes: of this block of the vocabulary."""
    return gradients_in_chunks(hidden, weight, target, top, log_total, scale, start, _overwrite)


def _overwrite(
    logits: Tensor, target: Tensor, top: Tensor, log_total: Tensor, scale: Tensor, start: int, grad: Tensor
) -> None:
    grad.copy_(cross_entropy_backward_reference(logits, target, top, log_total, scale, start, grad.shape[1]))


linear_cross_entropy = torch.library.custom_op(
    "autopar::linear_cross_entropy",
    linear_cross_entropy_reference,
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor target, int start) -> (Tensor, Tensor, Tensor)",
)
linear_cross_entropy_backward = torch.library.custom_op(
    "autopar::linear_cross_entropy_backward",
    linear_cross_entropy_backward_reference,
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor target, Tensor top, Tensor log_total, Tensor scale, int start)"
    " -> (Tensor, Tensor)",
)


@linear_cross_entropy.register_fake
def _(hidden: Tensor, weight: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    one, two, three = (hidden.new_empty(hidden.shape[:1], dtype=wide) for _ in range(3))
    return one, two, three


@linear_cross_entropy_backward.register_fake
def _(
    hidden: Tensor, weight: Tensor, target: Tensor, top: Tensor, log_total: Tensor, scale: Tensor, start: int
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)
