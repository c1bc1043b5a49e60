"""Predicting measured operators: each row is read as a case, and the case priced by the planner's operator models.

predict(rows, schema, "t0")       # constants shared by all devices
predict(rows, schema, "t1")       # constants fitted on that type of device, where there are any
predict(rows, schema, "physics")  # tiles, waves and bytes only, and the device's measured ceilings
naive(rows, schema)               # vendor-style roofline: FLOPs / peak, bytes / bandwidth, whichever is larger
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autopar.cost_models.operator_costs import rates_of
from autopar.cost_models.operators_attention import attention_curve, attention_seconds
from autopar.cost_models.operators_gemm import gemm_curve, gemm_seconds
from autopar.cost_models.operators_memory import memory_curve, memory_seconds
from autopar.errors import ConfigurationError
from autopar.hardware.device_curves import DeviceCurves, device_curves, physics_curves, shared_curves
from autopar.hardware.devices import Device, preset_device
from benchmarks.validation.operator_cases import Attention, Case, Gemm, Memory, Row, case_of
from benchmarks.validation.schemas import Predicted, Schema, Tier

HOST_FLOOR_SECONDS = 17.5e-6
"""Least time between two asynchronous calls of Transformer Engine's GEMM in a Python loop: the shortest of 424 products
that SimuMax timed so take 17-19 us on an A100 and a B200."""

HOST_ADDED_SECONDS: Mapping[str, float] = {"gemm": 28e-6, "softmax": 16e-6, "norm": 50e-6, "elementwise": 32e-6}
"""Dispatch and synchronisation of one eager PyTorch call that the host waits for: mean over an A100's and an MI210's
machine of LLMCompass's smallest calls (30 and 33, 13 and 24, 53 and 55, 48 and 22 us), less 2-3 us of the kernel."""

VENDOR_FRACTION = 1.0 / 0.80
"""What turns a measured ceiling into a vendor's peak, for the naive baseline: GPUs reach 78-87 % of theirs."""
VENDOR_MEMORY_FRACTION = 1.0 / 0.865
"""The same of the memory: an A100-80 reaches 86.5 % of its data sheet (`devices.json`)."""


def predict(rows: Sequence[Row], schema: Schema, tier: Tier) -> list[Predicted]:
    """One prediction per row; the reason where a kernel or a GPU is unknown."""
    return [_predict_row(row, schema, lambda case: case_seconds(case, curves_of(case, tier))) for row in rows]


def naive(rows: Sequence[Row], schema: Schema) -> list[Predicted]:
    """The baseline: a roofline with the vendor's peak and bandwidth, no tiles, no launch."""
    return [_predict_row(row, schema, naive_seconds) for row in rows]


def _predict_row(row: Row, schema: Schema, seconds_of: Callable[[Case], float]) -> Predicted:
    try:
        case = case_of(row, schema)
        seconds = seconds_of(case)
    except (ConfigurationError, KeyError, ValueError, ZeroDivisionError) as error:
        return Predicted(reason=f"{type(error).__name__}: {error}")
    return Predicted(values=_values(case, seconds, schema))


def _values(case: Case, seconds: float, schema: Schema) -> Mapping[str, float | str]:
    if schema.name == "op_deepgemm_h800_fp8":
        (_, gemm), *_ = case.parts
        assert isinstance(gemm, Gemm)
        moved = gemm.batch * (gemm.m * gemm.k + gemm.k * gemm.n + 2 * gemm.m * gemm.n)
        return {"tflops": case.flops / seconds / 1e12, "mem_GBps": moved / seconds / 1e9}
    (column,) = schema.measured["op"]
    if case.resolution_seconds:
        seconds = case.resolution_seconds * max(1, round(seconds / case.resolution_seconds))
    return {column: case.flops / seconds if case.flops else seconds / case.divisor}


def measured_seconds(row: Row, case: Case, schema: Schema) -> float:
    """The measured value of a row (with its measured column), in seconds."""
    value = float(row[next(iter(schema.measured["op"]))])
    if schema.name == "op_deepgemm_h800_fp8":
        value *= 1e12
    return case.flops / value if case.flops else value * case.divisor


def curves_of(case: Case, tier: Tier) -> DeviceCurves:
    """The constants that a tier may use for the machine of a case."""
    if tier == "physics":
        return physics_curves(case.device, preset_device(case.device).launch_seconds)
    return shared_curves(case.device) if tier == "t0" else device_curves(case.device, case.machine)


def case_seconds(case: Case, curves: DeviceCurves) -> float:
    """Seconds of all kernels of a case, and of the host where it was timed too."""
    device = preset_device(case.device)
    seconds = sum(count * _kernel_seconds(kernel, case.dtype, device, curves) for count, kernel in case.parts)
    if case.host == "floor":
        return max(seconds, HOST_FLOOR_SECONDS)
    if case.host == "added" and curves.tier != "fitted":
        return seconds + host_added_seconds(case)
    return seconds


def host_added_seconds(case: Case) -> float:
    """What the host adds to a call that it waits for."""
    (_, kernel), *_ = case.parts
    return HOST_ADDED_SECONDS[kernel.family if isinstance(kernel, Memory) else "gemm"]


def _kernel_seconds(kernel: Gemm | Memory | Attention, dtype: str, device: Device, curves: DeviceCurves) -> float:
    rates = rates_of(device, curves, dtype)
    if isinstance(kernel, Memory):
        family = memory_curve(curves, kernel.family)
        return float(memory_seconds(rates, family, kernel.nbytes, row=kernel.row, element_bytes=kernel.element_bytes))
    if isinstance(kernel, Attention):
        return float(
            attention_seconds(
                rates, attention_curve(curves, kernel.backward), batch=kernel.batch, heads=kernel.heads,
                key_heads=kernel.key_heads, queries=kernel.seq, keys=kernel.seq, qk_dim=kernel.qk_dim,
                v_dim=kernel.v_dim, causal=True, backward=kernel.backward,
            )
        )  # fmt: skip
    sizes = {
        "element_bytes": kernel.element_bytes,
        "output_bytes": kernel.output_bytes,
        "accumulate": kernel.accumulate,
    }
    if kernel.grouped and not kernel.fused:
        curve = gemm_curve(curves, dtype, "grouped")
        return kernel.batch * float(gemm_seconds(rates, curve, kernel.m, kernel.n, kernel.k, **sizes))
    curve = gemm_curve(curves, dtype, "batched" if kernel.batch > 1 and not kernel.grouped else "")
    return float(gemm_seconds(rates, curve, kernel.m, kernel.n, kernel.k, batch=kernel.batch, **sizes))


def naive_seconds(case: Case) -> float:
    """Seconds by the naive roofline."""
    device = preset_device(case.device)
    rates = rates_of(device, physics_curves(case.device), case.dtype)
    peak = rates.flops_per_second * VENDOR_FRACTION
    bandwidth = rates.memory_bytes_per_second * VENDOR_MEMORY_FRACTION
    return float(np.sum([count * max(f / peak, b / bandwidth) for count, f, b in map(_work, case.parts)]))


def _work(part: tuple[float, Gemm | Memory | Attention]) -> tuple[float, float, float]:
    """(how often, FLOPs, bytes) of a kernel."""
    count, kernel = part
    if isinstance(kernel, Memory):
        return count, 0.0, kernel.nbytes
    if isinstance(kernel, Attention):
        pairs = kernel.batch * kernel.heads * kernel.seq**2 / 2
        return count, pairs * (5 if kernel.backward else 2) * (kernel.qk_dim + kernel.v_dim), 0.0
    m, n, k, b = kernel.m, kernel.n, kernel.k, kernel.batch
    return count, 2.0 * b * m * n * k, b * ((m * k + k * n) * kernel.element_bytes + m * n * kernel.output_bytes)
