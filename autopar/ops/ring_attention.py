"""Ring attention as an operator, and what its messages are made of.

`autopar::ring_attention` computes what `autopar::attention` does. Its rule lets an axis cut the sequence of queries,
keys and values alike; blocks of keys and values then go around the ranks (`passes/implementations/attention_ring.py`).

    attention_block(q, k, v, ...)          of own rows over the keys of one block
    message(k, v, dtype)                   one buffer of both, each in the order (..., T, G, D) in memory
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ops.attention_formulas import ScoreOptions, store_by_sequence, visible_pairs
from autopar.ops.attention_operator import (
    attention,
    attention_backward,
    attention_backward_by_index,
    attention_by_index,
)
from autopar.ops.random_index import Runs

__all__ = [
    "attention_block",
    "attention_block_backward",
    "message",
    "ring_attention",
    "ring_attention_backward",
    "rounded",
]


def attention_block(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, salt: int, seed: Tensor | None, runs: Runs, shape: Sequence[int], *, window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention_by_index` as one block of several: a row that sees nothing of it is zero, its logsumexp -inf.

    Kernels differ in what they return for such a row, which a mask may leave.
    """
    out, logsumexp = attention_by_index(
        query, key, value, mask, dropout_p, is_causal, scale, salt, seed, runs, shape, window=window
    )
    if mask is None:
        return out, logsumexp
    seen = mask if mask.dtype == torch.bool else mask > -math.inf
    options = ScoreOptions(is_causal=is_causal, window=window, rows=runs[-2], keys=runs[-1])
    if options.hides:
        seen = seen & visible_pairs(query, key, options)
    unseen = ~seen.any(-1)
    return out.masked_fill(unseen.unsqueeze(-1), 0.0), logsumexp.masked_fill(unseen, -math.inf)


def attention_block_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor, logsumexp: Tensor,
    dropout_p: float, is_causal: bool, scale: float | None, salt: int, seed: Tensor | None, runs: Runs,
    shape: Sequence[int], *, window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Shares of the gradients, from out and logsumexp over all blocks; a row that sees nothing at all has none."""
    if mask is not None:
        logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
    return attention_backward_by_index(
        grad_out, query, key, value, mask, out, logsumexp, dropout_p, is_causal, scale, salt, seed, runs, shape,
        window=window,
    )


def message(first: Tensor, second: Tensor, dtype: torch.dtype, behind: Tensor | None = None) -> Tensor:
    """Both tensors (..., G, T, D) in one buffer of one dim, in a dtype.

    behind: a message that has arrived before: what reads it starts in the same order on all ranks.
    """
    return torch.cat([x.transpose(-3, -2).reshape(-1).to(dtype) for x in (first, second)])


def rounded(*values: Tensor, dtypes: Sequence[torch.dtype], unread: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """Values that were summed in a wider dtype, each in its own; those of four dims and more stored by sequence.

    unread: messages of which nothing was computed: a rank that dropped them would leave the others waiting.
    """
    found = [value.to(dtype) for value, dtype in zip(values, dtypes, strict=True)]
    return tuple(store_by_sequence(value) if value.dim() > 3 else value for value in found)


def _ring_of(operator: Any, name: str) -> Any:
    """An operator of the same schema, body and shapes under the name of a ring."""
    schema = str(operator._opoverload._schema).partition("(")[2]

    def run(*args: Any) -> Any:
        return operator(*args)

    ring = torch.library.custom_op(f"autopar::{name}", run, mutates_args=(), schema=f"({schema}")
    ring.register_fake(run)
    return ring


ring_attention = _ring_of(attention, "ring_attention")
ring_attention_backward = _ring_of(attention_backward, "ring_attention_backward")
