"""Chunks of rows: part of the rows of every group, and the way back.

x = tensor([0, 1, 2, 3, 4, 5, 6, 7])      # two groups of four rows
row_chunk(x, 2, 0, 2)                     # [0, 1, 4, 5]: the first half of each group
rows_joined([[0, 1, 4, 5], [2, 3, 6, 7]], 2)      # x again

Groups are the blocks of the ranks among which a collective cuts the rows; with one group a chunk is a slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def row_chunk(x: Tensor, groups: int, index: int, chunks: int) -> Tensor:
    """Chunk `index` of the rows (dim 0) of every group, contiguous; `groups * chunks` divides the rows."""
    return x.reshape(groups, chunks, -1, *x.shape[1:])[:, index].flatten(0, 1).contiguous()


def rows_joined(parts: Sequence[Tensor], groups: int) -> Tensor:
    """The rows of which `parts` are the chunks, in order; a new contiguous tensor."""
    if groups == 1:
        return torch.cat(list(parts))
    return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)


__all__ = ["row_chunk", "rows_joined"]
