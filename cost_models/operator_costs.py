"""Seconds of one operator, in three layers: a roofline, fitted curves, a measured profile of the user's device.

    roofline    kernels * launch + max(flops / matmul rate of the dtype, bytes / memory rate)
    curves      products by tiles and waves, attention by blocks, the rest by rows and caches, with constants fitted
                on published measurements (`operators_gemm`, `operators_attention`, `operators_memory`)
    profile     the curves bent to kernels that were measured on this device (`operators_measured`)

The curves count where the device has some (GPUs) and the caller knows the sizes; `hardware.pricing_tier` says which
layer did. Products and attention run at the clock that a busy device keeps (`sustained`), by curves, profile and
roofline alike. Nothing else prices an operator: the planner asks here for all strategies at once
(`planner/problem/prices.py`), a lowered program kernel by kernel (`kernel_seconds.py`).
All arrays broadcast; flops, bytes and sizes are those of one device (local shapes). On a CPU the launch is the
per-operator cost of eager torch under the contention of the other ranks, as calibration measures it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cost_models.operator_sizes import AttentionSizes, MlpSizes, ProductSizes, RowSizes, Sizes
from autopar.cost_models.operators_attention import (
    CPU_HEAD_DIM,
    CPU_NARROW_DIM,
    CPU_SOFTMAX_DIMS,
    NARROW,
    attention_curve,
    attention_seconds,
    causal_share_on_cpu,
    measured_softmax_dims,
    softmax_on_cpu,
)
from autopar.cost_models.operators_gemm import ELEMENT_BYTES, Rates, gemm_curve, gemm_seconds
from autopar.cost_models.operators_measured import measured_kernels, with_measured
from autopar.cost_models.operators_memory import memory_curve, memory_seconds
from autopar.cost_models.sustained import AttentionKernel, attention_speed, sustained, sustained_fraction
from autopar.errors import ConfigurationError
from autopar.graphs.operator_names import FLOAT8_PRODUCTS, LINEAR_LOSSES, OperatorKind
from autopar.hardware.device_curves import DeviceCurves
from autopar.hardware.devices import Device, OperatorCurve
from autopar.ops.tiled_mlp import most_rows

ATTENTION_EFFICIENCY = {"cuda": 0.80, "cpu": 0.90}
"""Part of the best matmul rate that fused attention reaches, its flops counted without the causal mask. cuda:
medians of 12 shapes on A100 are 1.00 of the peak forward and 0.80 backward, of 16 on B200 0.76 and 0.65
(MooreThreads/SimuMax configs/system @4dcaae5); cpu: 90 to 94 of 102 GFLOP/s on one idle AMD EPYC core, both ways, of
heads of 64 (`benchmarks.cut_attention`)."""

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
    "where": 137, "dropout": 680, "cumsum": 38, "reverse_cumsum": 38, "var_mean": 224,
    "linear_recurrence": 100,
}  # fmt: skip
"""Arithmetic per element of eager operators that memory does not bound on a CPU, in units of 1/40 ns: 2**20
fp32 elements on one AMD EPYC core of 100 GFLOP/s, torch 2.13. GELU is the exact one (tanh: 72 and 84)."""

FLOAT8 = "float8_e4m3fn"
FLOAT8_ELEMENT_FLOPS = {"cuda": 0.0, "cpu": 68.0}
"""Arithmetic per element of rounding to float8, in the unit of CPU_ELEMENT_FLOPS: 1.4 to 1.8 ns of bf16 on one
AMD EPYC core, torch 2.13."""

DTYPE_FALLBACKS = {"float16": "bfloat16", "bfloat16": "float16", "float64": "float32"}
"""Which measured rate prices a dtype without its own; see `matmul_flops_per_second` for the rest."""

FLOAT32_SLOWDOWNS = {"float64": 2.0, FLOAT8: 1.4}
"""Of dtypes that a CPU has no rate for, against float32: float64 has half as many elements in a vector register, and
torch computes float8 without instructions of its own (70 to 75 of 100 GFLOP/s on one AMD EPYC core, torch 2.13)."""


def operator_seconds(
    device: Device,
    *,
    flops: ArrayLike,
    bytes_moved: ArrayLike,
    dtype: str,
    kind: OperatorKind = "matmul",
    kernels: ArrayLike = 1,
    operator: str = "",
    sizes: Sizes | None = None,
    share: ArrayLike = 1,
    attention: AttentionKernel = "vendor",
) -> NDArray[np.float64]:
    """Seconds of operators on one device, broadcast over the arrays.

    `sizes` (of `operator_sizes.sizes_of`) lets a GPU's curves count instead of the roofline.
    `operator` is the bare ATen name ("mm"): where the device carries a measured curve of it in this dtype, the curve
    counts and the ceilings do not.

    `flops` counts a multiply-add as 2; `bytes_moved` is everything read and written; `dtype` names the type
    the matmul runs in ("bfloat16"); `kernels` is how many kernels are launched (0 for a folded view or a
    member of another operator's kernel). "memory" is elementwise arithmetic: its flops are elements times
    `element_flops`. `share`: part of its kernel's bytes that a member of a fused kernel moves (members of one
    kernel add up to the kernel where all are split alike). `attention`: the kernel that the software calls;
    programs of ours call cuDNN's on Hopper and later. Raises ConfigurationError where the device has no rate for
    `dtype`.
    """
    if operator in FLOAT8_PRODUCTS and isinstance(sizes, ProductSizes):
        return _float8_seconds(device, operator, sizes, dtype)
    if operator in LINEAR_LOSSES and isinstance(sizes, ProductSizes):
        return _linear_loss_seconds(device, operator, sizes, dtype)
    if isinstance(sizes, MlpSizes):
        return _tiled_mlp_seconds(device, operator, sizes, dtype)
    if isinstance(sizes, AttentionSizes) and device.kind == "cpu":
        dims = _softmax_dims(device.operators, operator, dtype)
        flops = np.asarray(flops, np.float64) * softmax_on_cpu(sizes.qk_dim, sizes.v_dim, dims)
        if sizes.causal:
            flops = flops * causal_share_on_cpu(sizes.queries, sizes.keys)
    curve = next((c for c in device.operators if (c.operator, c.dtype) == (operator, dtype)), None)
    if curve is not None:
        return _on_curve(curve, bytes_moved if kind == "memory" else flops, kernels, device.launch_seconds)
    stream = next((c for c in device.operators if c.operator == STREAMING), None) if kind == "memory" else None
    if stream is not None:
        arithmetic = np.asarray(flops, np.float64) * _seconds_per_flop(device, dtype, "memory")
        return np.maximum(
            _on_curve(stream, bytes_moved, kernels, device.launch_seconds) * (np.asarray(kernels) > 0), arithmetic
        )
    if device.curves is not None and (sizes is not None or kind == "memory"):
        sized = sizes or RowSizes(family="elementwise")
        if isinstance(sized, RowSizes):  # GPUs multiply and add faster than they read: only bytes count
            seconds = _memory_on_curves(device, device.curves, sized, dtype, bytes_moved, kernels, share)
            return seconds + np.zeros(np.shape(flops))
        return _on_curves(device, device.curves, sized, dtype, attention)
    stream_seconds = np.asarray(bytes_moved, np.float64) / device.memory_bytes_per_second
    launch = np.asarray(kernels, np.float64) * device.launch_seconds
    math_seconds = np.asarray(flops, np.float64) * _seconds_per_flop(device, dtype, kind)
    return launch + np.maximum(math_seconds, stream_seconds)


FLOAT8_READS = {"mm_fp8_rowwise": 1, "mm_fp8_tensorwise": 2}
"""How often a product reads its operands from memory to round them: a row stays in the cache between the search for
its largest value and the rounding, a whole tensor does not: 40 and 72 us for 8192 x 4096 on
an H100 (benchmarks/results/gpu/kernels.json)."""
FLOAT8_LAUNCHES = {"mm_fp8_rowwise": 1, "mm_fp8_tensorwise": 3}
"""Kernels that round one operand there: of a tensor a zero, the largest value, the rounding."""


def _linear_loss_seconds(device: Device, operator: str, sizes: ProductSizes, dtype: str) -> NDArray[np.float64]:
    """The products of rows (m, k) with a vocabulary (n, k) and the passes over their logits (m, n) between them, as if
    these were whole: forward one product and one read; backward two more, and the gradient written over the logits."""
    m, n, k = (np.asarray(size, np.float64) for size in (sizes.m, sizes.n, sizes.k))
    is_backward = operator.endswith("_backward")
    element = ELEMENT_BYTES[dtype]
    products = ((m, n, k), (m, k, n), (n, k, m))[: 3 if is_backward else 1]
    return _products_seconds(device, products, dtype) + operator_seconds(
        device,
        flops=m * n * element_flops(device, "cross_entropy_rows"),
        bytes_moved=m * n * element * (2 if is_backward else 1),
        dtype=dtype,
        kind="memory",
        operator="cross_entropy_backward" if is_backward else "cross_entropy_rows",
        sizes=RowSizes(family="softmax", row=n),
    )


def _tiled_mlp_seconds(device: Device, operator: str, sizes: MlpSizes, dtype: str) -> NDArray[np.float64]:
    """The products of all rows and the passes over their hidden activations, as if these were whole; backward makes
    those of forward again, and adds narrow gradients of weights to totals in fp32 once a tile."""
    rows, hidden, width, out = (
        np.asarray(size, np.float64) for size in (sizes.rows, sizes.hidden, sizes.width, sizes.out)
    )
    element, inputs = ELEMENT_BYTES[dtype], sizes.inputs
    products = [*[(rows, hidden, width)] * inputs, (rows, out, hidden)]
    passes, arithmetic, added = inputs + 1, element_flops(device, "gelu"), np.zeros(())
    if operator.endswith("_backward"):
        products = [*[(rows, hidden, width), (rows, width, hidden), (hidden, width, rows)] * inputs]
        products += [(rows, hidden, out), (out, hidden, rows)]
        passes, arithmetic = 3 * inputs + 2, arithmetic + element_flops(device, "gelu_backward")
        tiles = np.ceil(rows / most_rows(sizes.width))
        each = 10 if element < 4 else 4  # a total is read and written in fp32, and a narrow product read
        added = np.where(tiles > 1, tiles * each * hidden * (inputs * width + out), 0.0)
    between = operator_seconds(
        device,
        flops=rows * hidden * arithmetic,
        bytes_moved=rows * hidden * passes * element,
        dtype=dtype,
        kind="memory",
        operator="gated",
        sizes=RowSizes(family="elementwise"),
    )
    adding = np.where(added > 0, copy_seconds(device, added / 2), 0.0)
    return _products_seconds(device, products, dtype) + between + adding


def _products_seconds(
    device: Device, products: Iterable[tuple[NDArray[np.float64], ...]], dtype: str
) -> NDArray[np.float64]:
    """Of products with m rows, n columns and k in between."""
    found: NDArray[np.float64] = np.zeros(())
    for m, n, k in products:
        found = found + operator_seconds(
            device,
            flops=2 * m * n * k,
            bytes_moved=(m * k + k * n + m * n) * ELEMENT_BYTES[dtype],
            dtype=dtype,
            operator="mm",
            sizes=ProductSizes(m=m, n=n, k=k),
        )
    return found


def _float8_seconds(device: Device, operator: str, sizes: ProductSizes, dtype: str) -> NDArray[np.float64]:
    """A product whose operands are rounded first: these are read in their dtype and written as float8, and the product
    reads float8 and writes their dtype."""
    m, n, k, batch = (np.asarray(size, np.float64) for size in (sizes.m, sizes.n, sizes.k, sizes.batch))
    wide, narrow, reads = ELEMENT_BYTES[dtype], ELEMENT_BYTES[FLOAT8], FLOAT8_READS[operator]
    seconds = operator_seconds(
        device,
        flops=2 * m * n * k * batch,
        bytes_moved=batch * ((m * k + k * n) * narrow + m * n * wide),
        dtype=FLOAT8,
        operator="mm",
        sizes=replace(sizes, output_bytes=int(wide)),
    )
    for elements in (batch * m * k, batch * k * n):
        seconds = seconds + operator_seconds(
            device,
            flops=elements * FLOAT8_ELEMENT_FLOPS[device.kind],
            bytes_moved=elements * (reads * wide + narrow),
            dtype=dtype,
            kind="memory",
            kernels=FLOAT8_LAUNCHES[operator],
            operator="quantised",
        )
    return seconds


STREAMING = "add"
"""Name of the curve that prices operators bound by memory which were not measured themselves, by their bytes."""
OPTIMIZER = "optimizer"
"""Name of the curve of one parameter's update: AdamW on a DTensor, work is what the step reads and writes."""


SGD = "sgd"
"""Name of the curve of an update by SGD, which makes one pass where AdamW makes a dozen."""


def optimizer_seconds(device: Device, bytes_moved: ArrayLike, curve: str = OPTIMIZER) -> NDArray[np.float64]:
    """Seconds to update parameters of which a step reads and writes `bytes_moved` each (with gradient and state).

    By the measured curve of this name where the device has one, else by AdamW's; where it has none, by the memory rate
    alone, as one kernel for all parameters.
    """
    traffic = np.asarray(bytes_moved, np.float64)
    seconds = operator_seconds(
        device,
        flops=0.0,
        bytes_moved=np.maximum(traffic, 1.0),
        dtype="float32",
        kind="memory",
        kernels=0,
        operator=curve if any(measured.operator == curve for measured in device.operators) else OPTIMIZER,
    )
    return np.where(traffic > 0, seconds, 0.0)


@cache
def _softmax_dims(curves: tuple[OperatorCurve, ...], operator: str, dtype: str) -> float:
    """What the softmax of a pair costs by the curves of wide and of narrow heads; without them, as elsewhere."""
    name = operator.removesuffix("_with_mask")
    found = {c.operator: c for c in curves if c.dtype == dtype and c.operator.removesuffix(NARROW) == name}
    wide, narrow = found.get(name), found.get(name + NARROW)
    if wide is None or narrow is None:
        return CPU_SOFTMAX_DIMS
    work = narrow.work[-1] * CPU_HEAD_DIM / CPU_NARROW_DIM
    return measured_softmax_dims(float(_on_curve(wide, work, 0, 0.0)), narrow.seconds[-1])


def _on_curve(curve: OperatorCurve, work: ArrayLike, kernels: ArrayLike, launch_seconds: float) -> NDArray[np.float64]:
    """Between samples the seconds are straight in logarithms, above them proportional to the work, below them those of
    the smallest sample; a kernel takes at least its launch."""
    wanted = np.asarray(work, np.float64)
    inside = np.clip(wanted, curve.work[0], curve.work[-1])
    seconds = np.exp(np.interp(np.log(inside), np.log(curve.work), np.log(curve.seconds)))
    return np.asarray(np.maximum(seconds * np.maximum(wanted / inside, 1), np.asarray(kernels) * launch_seconds))


def _on_curves(
    device: Device, curves: DeviceCurves, sizes: ProductSizes | AttentionSizes, dtype: str, attention: AttentionKernel
) -> NDArray[np.float64]:
    """Seconds of products and attention by the curves of a GPU, bent to its measured profile, on a busy device."""
    rates = rates_of(device, curves, dtype)
    kind, columns = _columns(sizes)
    shape = np.broadcast_shapes(*(np.shape(column) for column in columns))
    at = np.stack([np.broadcast_to(np.asarray(c, np.float64), shape).ravel() for c in columns], axis=1)
    seconds = _kernel_model(sustained(rates, curves), curves, sizes, dtype, at)
    points = measured_kernels(device.profile, kind, dtype, isinstance(sizes, AttentionSizes) and sizes.causal)
    if points:  # what was measured is one kernel on a cool device, and the attention kernel that torch calls

        def short(at: NDArray[np.float64]) -> NDArray[np.float64]:
            return _kernel_model(rates, curves, sizes, dtype, at)

        seconds = seconds * with_measured(points, at, short) / short(at)
    elif isinstance(sizes, AttentionSizes):
        seconds = seconds / attention_speed(attention, curves)
    return np.asarray(seconds.reshape(shape))


def _columns(sizes: ProductSizes | AttentionSizes) -> tuple[str, tuple[ArrayLike, ...]]:
    """(kind of a measured kernel, its sizes in the order of `operator_profile.SIZES`)."""
    if isinstance(sizes, ProductSizes):
        return "grouped gemm" if sizes.grouped else "gemm", (sizes.m, sizes.n, sizes.k, sizes.batch)
    kind = "attention backward" if sizes.backward else "attention forward"
    return kind, (sizes.batch, sizes.heads, sizes.queries, sizes.keys, sizes.qk_dim, sizes.v_dim)


def _kernel_model(
    rates: Rates, curves: DeviceCurves, sizes: ProductSizes | AttentionSizes, dtype: str, at: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(n,) seconds at (n, dims) sizes in the order of `_columns`."""
    if isinstance(sizes, ProductSizes):
        return _products(rates, curves, sizes, dtype, at)
    batch, heads, queries, keys, qk_dim, v_dim = at.T
    return attention_seconds(
        rates, attention_curve(curves, sizes.backward), batch=batch, heads=heads,
        key_heads=heads / sizes.queries_per_key, queries=queries, keys=keys, qk_dim=qk_dim, v_dim=v_dim,
        causal=sizes.causal, backward=sizes.backward, element_bytes=ELEMENT_BYTES.get(dtype, 4),
    )  # fmt: skip


def _products(
    rates: Rates, curves: DeviceCurves, sizes: ProductSizes, dtype: str, at: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(n,) seconds of products at (n, 4) sizes, those of one matrix and those of batches by their own constants."""
    element = ELEMENT_BYTES.get(dtype, 4)
    several = at[:, 3] > 1
    seconds = np.empty(len(at))
    for chosen, variant in ((~several, ""), (several, "batched")):
        if chosen.any():
            m, n, k, batch = at[chosen].T
            seconds[chosen] = gemm_seconds(
                rates, gemm_curve(curves, dtype, "grouped" if sizes.grouped else variant), m, n, k, batch=batch,
                element_bytes=element, output_bytes=sizes.output_bytes or max(element, 2), accumulate=sizes.accumulates,
            )  # fmt: skip
    return seconds


def _memory_on_curves(
    device: Device,
    curves: DeviceCurves,
    sizes: RowSizes,
    dtype: str,
    nbytes: ArrayLike,
    kernels: ArrayLike,
    share: ArrayLike,
) -> NDArray[np.float64]:
    rates, curve = rates_of(device, curves, dtype), memory_curve(curves, sizes.family)
    points = measured_kernels(device.profile, sizes.family, dtype)
    if not points:
        return memory_seconds(rates, curve, nbytes, row=sizes.row, launches=kernels, share=share)
    moved, row, launches = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (nbytes, sizes.row, kernels)))

    def model(at: NDArray[np.float64]) -> NDArray[np.float64]:
        return memory_seconds(rates, curve, at[:, 0], row=at[:, 1])

    seconds = with_measured(points, np.stack([moved.ravel(), row.ravel()], axis=1), model).reshape(moved.shape)
    return np.asarray(np.maximum(seconds - (1 - launches) * curve.launch_seconds, 0.0))


def _seconds_per_flop(device: Device, dtype: str, kind: OperatorKind) -> float:
    if kind == "memory":
        return 1.0 / (VECTOR_FRACTION[device.kind] * matmul_flops_per_second(device, "float32"))
    efficiency = ATTENTION_EFFICIENCY[device.kind] if kind == "attention" else 1.0
    kept = 1.0 if device.curves is None else sustained_fraction(device.curves)
    return 1.0 / (efficiency * kept * matmul_flops_per_second(device, dtype))


def rates_of(device: Device, curves: DeviceCurves, dtype: str) -> Rates:
    """What the operator models take of a device: its ceilings, units and cache."""
    return Rates(
        flops_per_second=matmul_flops_per_second(device, dtype),
        memory_bytes_per_second=device.memory_bytes_per_second,
        sm_count=curves.sm_count,
        l2_bytes=curves.l2_bytes,
        clock_hz=curves.clock_hz,
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
            return rates[known] / (FLOAT32_SLOWDOWNS.get(dtype, 1.0) if known == "float32" else 1.0)
    raise ConfigurationError(f"device {device.name!r} has no flops_per_second for {dtype!r}: it has {sorted(rates)}")
