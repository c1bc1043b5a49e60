"""Seconds of one operator: a roofline over measured ceilings, plus the launch of its kernels.

    seconds = kernels * launch + max(flops / matmul rate of the dtype, bytes / memory rate)

All arrays broadcast; flops and bytes are those of one device (local shapes). On a CPU the launch is the
per-operator cost of eager torch under the contention of the other ranks, as calibration measures it.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cluster import Device
from autopar.errors import ConfigurationError

OperatorKind = Literal["matmul", "attention", "memory"]

ATTENTION_EFFICIENCY = {"cuda": 0.80, "cpu": 0.50}
"""Part of the best matmul rate that fused attention reaches, its flops counted without the causal mask. cuda:
medians of 12 shapes on A100 are 1.00 of the peak forward and 0.80 backward, of 16 on B200 0.76 and 0.65
(MooreThreads/SimuMax configs/system @4dcaae5); cpu: assumption."""

TRANSPOSING_COPY_SLOWDOWN = {"cuda": 1.5, "cpu": 3.0}
"""A copy that changes the innermost dim, against a contiguous one. Assumptions, to be measured."""

DTYPE_FALLBACKS = {"float16": "bfloat16", "bfloat16": "float16", "float64": "float32"}
"""Which measured rate prices a dtype without its own; see `matmul_flops_per_second` for the rest."""

FLOAT64_SLOWDOWN = 2.0
"""float64 against float32 where only float32 is measured: half as many elements in a vector register."""


def operator_seconds(
    device: Device,
    *,
    flops: ArrayLike,
    bytes_moved: ArrayLike,
    dtype: str,
    kind: OperatorKind = "matmul",
    kernels: ArrayLike = 1,
) -> NDArray[np.float64]:
    """Seconds of operators on one device, broadcast over the arrays.

    `flops` counts a multiply-add as 2; `bytes_moved` is everything read and written; `dtype` names the type
    the matmul runs in ("bfloat16"); `kernels` is how many kernels are launched (0 for a folded view or a
    member of another operator's kernel). "memory" ignores flops. Raises ConfigurationError where the device
    has no rate for `dtype`.
    """
    stream_seconds = np.asarray(bytes_moved, np.float64) / device.memory_bytes_per_second
    launch = np.asarray(kernels, np.float64) * device.launch_seconds
    math_seconds = np.asarray(flops, np.float64) * _seconds_per_flop(device, dtype, kind)
    return launch + np.maximum(math_seconds, stream_seconds)


def _seconds_per_flop(device: Device, dtype: str, kind: OperatorKind) -> float:
    if kind == "memory":
        return 0.0
    efficiency = ATTENTION_EFFICIENCY[device.kind] if kind == "attention" else 1.0
    return 1.0 / (efficiency * matmul_flops_per_second(device, dtype))


def copy_seconds(device: Device, nbytes: ArrayLike, *, transposing: bool = False) -> NDArray[np.float64]:
    """Seconds to read and write `nbytes` once (slice, pad, concatenate, transpose); 0 where `nbytes` is 0."""
    sizes = np.asarray(nbytes, np.float64)
    slowdown = TRANSPOSING_COPY_SLOWDOWN[device.kind] if transposing else 1.0
    seconds = device.launch_seconds + sizes * (2.0 * slowdown / device.memory_bytes_per_second)
    return np.where(sizes > 0, seconds, 0.0)


def matmul_flops_per_second(device: Device, dtype: str) -> float:
    """The measured ceiling of `dtype`, else of its fallback, else of float32."""
    rates = device.flops_per_second
    for known in (dtype, DTYPE_FALLBACKS.get(dtype, ""), "float32"):
        if known in rates:
            return rates[known] / (FLOAT64_SLOWDOWN if dtype == "float64" and known == "float32" else 1.0)
    raise ConfigurationError(
        f"device {device.name!r} has no flops_per_second for {dtype!r}: it has {sorted(rates)}"
    )
