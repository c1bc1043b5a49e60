"""Seconds of one operator: a roofline over measured ceilings, plus the launch of its kernels.

    seconds = kernels * launch + max(flops / matmul rate of the dtype, bytes / memory rate)

All arrays broadcast; flops and bytes are those of one device (local shapes). On a CPU the launch is the
per-operator cost of eager torch under the contention of the other ranks, as calibration measures it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cost_models.operators_gemm import Rates
from autopar.device_curves import DeviceCurves
from autopar.errors import ConfigurationError
from autopar.hardware import Device

OperatorKind = Literal["matmul", "attention", "memory"]

ATTENTION_EFFICIENCY = {"cuda": 0.80, "cpu": 0.80}
"""Part of the best matmul rate that fused attention reaches, its flops counted without the causal mask. cuda:
medians of 12 shapes on A100 are 1.00 of the peak forward and 0.80 backward, of 16 on B200 0.76 and 0.65
(MooreThreads/SimuMax configs/system @4dcaae5); cpu: 78-85 of 101 GFLOP/s on one AMD EPYC core, both ways."""

TRANSPOSING_COPY_SLOWDOWN = {"cuda": 1.5, "cpu": 5.0}
"""A copy that changes the innermost dim, against a contiguous one. cpu: 5.0-6.3 measured for 512..2048 square
fp32 on one AMD EPYC core; cuda: assumption."""

VECTOR_FRACTION = {"cuda": 1.0, "cpu": 0.4}
"""Rate of elementwise arithmetic against the float32 matmul rate. cpu: the unit of CPU_ELEMENT_FLOPS."""

CPU_ELEMENT_FLOPS: Mapping[str, float] = {
    "exp": 33, "log": 40, "sqrt": 17, "rsqrt": 11, "tanh": 100, "sigmoid": 16, "sin": 49, "cos": 49,
    "erf": 52, "gelu": 20, "gelu_backward": 32, "silu": 16, "silu_backward": 20,
    "native_layer_norm": 11, "native_layer_norm_backward": 17, "_fused_rms_norm": 15,
    "_softmax": 23, "_softmax_backward_data": 6.5, "_log_softmax": 23, "_log_softmax_backward_data": 16,
    "where": 137, "native_dropout": 308, "cumsum": 38, "var_mean": 224,
}  # fmt: skip
"""Arithmetic per element of eager operators that memory does not bound on a CPU, in units of 1/40 ns: 2**20
fp32 elements on one AMD EPYC core of 100 GFLOP/s, torch 2.13. GELU is the exact one (tanh: 72 and 84)."""

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
    member of another operator's kernel). "memory" is elementwise arithmetic: its flops are elements times
    `element_flops`. Raises ConfigurationError where the device
    has no rate for `dtype`.
    """
    stream_seconds = np.asarray(bytes_moved, np.float64) / device.memory_bytes_per_second
    launch = np.asarray(kernels, np.float64) * device.launch_seconds
    math_seconds = np.asarray(flops, np.float64) * _seconds_per_flop(device, dtype, kind)
    return launch + np.maximum(math_seconds, stream_seconds)


def _seconds_per_flop(device: Device, dtype: str, kind: OperatorKind) -> float:
    if kind == "memory":
        return 1.0 / (VECTOR_FRACTION[device.kind] * matmul_flops_per_second(device, "float32"))
    efficiency = ATTENTION_EFFICIENCY[device.kind] if kind == "attention" else 1.0
    return 1.0 / (efficiency * matmul_flops_per_second(device, dtype))


def rates_of(device: Device, curves: DeviceCurves, dtype: str) -> Rates:
    """What the operator models take of a device: its ceilings, units and cache."""
    return Rates(
        flops_per_second=matmul_flops_per_second(device, dtype),
        memory_bytes_per_second=device.memory_bytes_per_second,
        sm_count=curves.sm_count,
        l2_bytes=curves.l2_bytes,
    )


def element_flops(device: Device, operator: str) -> float:
    """Arithmetic per element of a "memory" operator, by its bare ATen name ("gelu", "_softmax")."""
    return CPU_ELEMENT_FLOPS.get(operator, 1.0) if device.kind == "cpu" else 1.0


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
    raise ConfigurationError(f"device {device.name!r} has no flops_per_second for {dtype!r}: it has {sorted(rates)}")
