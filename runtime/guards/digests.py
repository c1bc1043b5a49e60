"""Digests: 64 bits that stand for the values of a tensor, or for a text, equal in all processes.

    digests_of([batch["tokens"], batch["labels"]])     # [-4611..., 9012...]: one copy from the device for both

What ranks compare instead of the values themselves. Two tensors share a digest where all their bits agree, and else by
chance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

_COLUMNS = 1024
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""Multiplies the numbers of columns and rows, so that values which change places change the sum (the golden ratio's
fraction, in 64 bits)."""


def digests_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The digest of each tensor, of any dtype and shape; all have one (`has_digest`)."""
    sums = [_weighted_sum(tensor) for tensor in tensors]
    if len({total.device for total in sums}) == 1:
        return [int(total) for total in torch.stack(sums).tolist()]
    return [int(total) for total in sums]


def has_digest(tensor: torch.Tensor) -> bool:
    """Whether it is a plain strided tensor with values: the bits of subclasses are their own affair."""
    is_plain = type(tensor.data) is torch.Tensor and tensor.layout is torch.strided
    return is_plain and not tensor.is_quantized and not tensor.is_meta


def digest_of_text(text: str) -> int:
    """That of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def _weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of rows and of columns of 64-bit words, weighted by their numbers: rows or columns that change places show.
    0-dim int64, on the tensor's device."""
    flat = tensor.detach().reshape(-1)
    flat = flat.clone() if flat.storage_offset() else flat.contiguous()
    data = flat.view(torch.uint8)
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    rows = words.numel() // _COLUMNS
    weights = torch.arange(1, 2 * _COLUMNS, 2, device=data.device) * _ODD
    table = words[: rows * _COLUMNS].view(rows, _COLUMNS)
    total = (table.sum(0) * weights).sum() + (table.sum(1) * torch.arange(rows, device=data.device) * _ODD).sum()
    total += (words[rows * _COLUMNS :] * weights[: words.numel() - rows * _COLUMNS]).sum()
    rest = data[words.numel() * 8 :].to(torch.int64)
    return total + (rest * weights[-8:][: rest.numel()]).sum()
