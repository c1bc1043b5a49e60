"""A small tensor written out in the graph: the operator that stands for a constant of the model's code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def constant(values: Sequence[float], shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor of `shape` with `values` in row-major order."""
    return torch.tensor(values, dtype=dtype, device=device).reshape(shape)
