"""Buckets: several tensors as one buffer for one collective, and the way back.

flat = packed([a[2, 3], b[4]])               # 10 elements: those of a, then those of b
rows = packed_rows([c[4, 3], d[2]], 2)       # per rank its half of c, then its half of d: 7 elements, twice
rows_part(gathered, 2, 6, (2,))              # d again, from the rows that an all_gather laid one behind the other
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all tensors one behind the other, in a new 1-dim buffer."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def packed_rows(tensors: Sequence[Tensor], ranks: int) -> Tensor:
    """A new 1-dim buffer, one row per rank with its piece of every tensor; dim 0 of a tensor counts ranks first."""
    return torch.cat([tensor.reshape(ranks, -1) for tensor in tensors], 1).reshape(-1)


def rows_part(rows: Tensor, ranks: int, start: int, shape: Sequence[int]) -> Tensor:
    """One of the tensors of `packed_rows`, whose piece begins at `start` of every row; a new contiguous tensor."""
    length = math.prod(shape) // ranks
    return rows.view(ranks, -1)[:, start : start + length].contiguous().view(tuple(shape))


__all__ = ["packed", "packed_rows", "rows_part"]
