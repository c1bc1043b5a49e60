"""masked_scatter, whose positions depend on values, as a scan of the mask, a lookup and a choice.

    masked_scatter(x[b, s, d], mask[b, s] expanded, source[n, d])
        -->   where(mask, source[cumsum(mask) - 1], x)

Multimodal models put image features into the sequence this way. A mask that is expanded over its last dims takes
whole rows of the source; then only b * s positions are counted, and d may be split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """`torch.masked_scatter`: elements of `x` where `mask` is True are replaced by those of `source` in their order."""
    shape = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]
    x, mask = x.expand(shape), mask.expand(shape)
    if not source.numel():
        return x.clone()
    width = _row_width(mask, source.numel())
    positions = _source_rows(mask, width)
    rows = source.flatten().view(-1, width).index_select(0, positions)
    return torch.where(mask, rows.view(shape), x)


def masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """Gradient of the source, of the given sizes: zeros where it was not used."""
    if not math.prod(sizes):
        return torch.zeros(list(sizes), dtype=grad.dtype, device=grad.device)
    mask = mask.expand(grad.shape)
    width = _row_width(mask, math.prod(sizes))
    used = torch.where(mask, grad, 0.0).reshape(-1, width)
    zeros = torch.zeros([math.prod(sizes) // width, width], dtype=grad.dtype, device=grad.device)
    return zeros.index_add(0, _source_rows(mask, width), used).view(list(sizes))


def _row_width(mask: Tensor, num_elements: int) -> int:
    """Elements that share one decision of the mask: the last dims over which it is expanded."""
    width = 1
    for size, stride in zip(reversed(mask.shape), reversed(mask.stride()), strict=True):
        if stride != 0 and size != 1:
            break
        width *= size
    return width if num_elements % width == 0 else 1


def _source_rows(mask: Tensor, width: int) -> Tensor:
    """Per row of the mask, the row of the source that it takes; any row where the mask is False."""
    is_taken = mask.reshape(-1, width)[:, 0]
    return (is_taken.long().cumsum(0) - 1).clamp(min=0)
