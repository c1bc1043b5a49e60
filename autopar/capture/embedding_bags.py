"""Embedding bags as lookups and sums, whose rules split the batch, the positions, the table's rows and its columns.

embedding_bag(ids[b, l], table)              -->   table[ids].sum(1)
embedding_bag(ids[n], table, offsets[b])     -->   index_add(zeros[b, d], 0, bag of every id, table[ids])
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """`torch.nn.functional.embedding_bag`: (B, L) or (N) ids -> (B, D). Gradients are dense whatever `sparse` says."""
    rows = functional.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    counted = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        counted = input != padding_idx % len(weight)
        rows = rows.masked_fill(~counted.unsqueeze(-1), float("-inf") if mode == "max" else 0.0)
    if offsets is None:
        return _reduce_rows(rows, counted, mode)
    starts = offsets[:-1] if include_last_offset else offsets
    positions = torch.arange(input.shape[0], device=input.device)
    bags = torch.searchsorted(starts.contiguous(), positions, right=True) - 1
    return _reduce_bags(rows, counted, bags, starts.shape[0], mode)


def _reduce_rows(rows: Tensor, counted: Tensor, mode: str) -> Tensor:
    """(B, L, D) rows, those that do not count neutral -> (B, D)."""
    if mode == "max":
        return torch.where(counted.any(1, keepdim=True), rows.amax(1), 0.0)
    total = rows.sum(1)
    return total / counted.sum(1, keepdim=True).clamp(min=1) if mode == "mean" else total


def _reduce_bags(rows: Tensor, counted: Tensor, bags: Tensor, num_bags: int, mode: str) -> Tensor:
    """(N, D) rows, those that do not count neutral, and the bag of each -> (num_bags, D)."""
    zeros = rows.new_zeros(num_bags, rows.shape[1])
    if mode == "max":
        index = bags.unsqueeze(-1).expand_as(rows)
        largest = torch.full_like(zeros, float("-inf")).scatter_reduce(0, index, rows, "amax")
        return largest.masked_fill(largest == float("-inf"), 0.0)
    total = zeros.index_add(0, bags, rows)
    if mode == "sum":
        return total
    counts = rows.new_zeros(num_bags).index_add(0, bags, counted.to(rows.dtype))
    return total / counts.clamp(min=1).unsqueeze(-1)
