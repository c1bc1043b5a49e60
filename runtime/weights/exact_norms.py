"""Exact norms: the joint norm of gradients as sums of integers, which no order changes.

    y = |g| 2^-e, below 1 for all        e: of the largest element of all ranks
    y^2 = high 2^-30 + low 2^-60 + ...   two whole numbers per element, added up over elements, parameters and ranks

So it has equal bits whatever blocks ranks hold. What is cut off is below 2^-60 of the largest square per element: with
2^33 elements 2^-27 of the sum, less than fp32 holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.errors import ConfigurationError

_BITS = 30


def exact_norm(blocks: Sequence[torch.Tensor], norm_type: float, device: torch.device, distributed: bool) -> float:
    """The norm of all blocks of all ranks; each element is in one of them. All ranks call it alike.

    norm_type: 1, 2 or infinity. Raises ConfigurationError for another one.
    """
    if norm_type not in (1.0, 2.0, math.inf):
        raise ConfigurationError(
            f"norm_type={norm_type}: in logical shards (deterministic=) norms are exact for 1, 2 and infinity"
        )
    peak = _peak(blocks, device, distributed)
    if not math.isfinite(peak) or peak == 0.0 or math.isinf(norm_type):
        return peak
    exponent = math.frexp(peak)[1]
    below_one = math.ldexp(1.0, -exponent)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for block in blocks:
        sums += _whole_numbers(block.detach().double().abs() * below_one, norm_type)
    if distributed:
        dist.all_reduce(sums)
    high, low = sums.tolist()
    total = (high << _BITS) + low
    if norm_type == 1.0:
        return math.ldexp(total, exponent - 2 * _BITS)
    return math.ldexp(math.sqrt(total), exponent - _BITS)


def _peak(blocks: Sequence[torch.Tensor], device: torch.device, distributed: bool) -> float:
    """The largest element of all; NaN where there is one."""
    peaks = [block.detach().abs().max().double() for block in blocks if block.numel()]
    peak = torch.stack(peaks).max() if peaks else torch.zeros((), dtype=torch.float64, device=device)
    found = torch.stack((peak.nan_to_num(nan=math.inf, posinf=math.inf), peak.isnan().double()))
    if distributed:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    largest, is_nan = found.tolist()
    return math.nan if is_nan else largest


def _whole_numbers(y: torch.Tensor, norm_type: float) -> torch.Tensor:
    """(2,) int64: the sums of the first and of the next 30 binary digits of the powers of `y`, which is below 1."""
    scaled = (y * y if norm_type == 2.0 else y) * 2.0**_BITS
    high = scaled.floor()
    low = ((scaled - high) * 2.0**_BITS).floor()
    return torch.stack((high.long().sum(), low.long().sum()))
