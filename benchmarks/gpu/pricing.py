"""What the cost model says of one kernel: the prediction that stands beside a measurement.

    priced(ProductSizes(m=4096, n=4096, k=4096), "bfloat16", priced_device(place)).seconds
"""

from __future__ import annotations

from autopar.cost_models.operator_costs import operator_seconds
from autopar.cost_models.operator_sizes import AttentionSizes, ProductSizes, RowSizes, flops_of
from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import Device
from autopar.hardware.operator_profile import MeasuredKernel
from benchmarks.gpu.stage import Place

REHEARSED = "1 H100-SXM"
"""Whose prices a rehearsal takes: a GPU's curves are what is to be rehearsed."""


def priced_device(place: Place) -> Device:
    """The device of this machine as it is planned for."""
    return (Cluster.detect(1) if place.on_cuda else Cluster.parse(REHEARSED)).device


def product_seconds(sizes: ProductSizes, dtype: str, device: Device, operator: str = "mm") -> float:
    """Of a product; operator: "mm", or one that rounds its operands first."""
    flops = flops_of(sizes)
    return float(operator_seconds(device, flops=flops, bytes_moved=0.0, dtype=dtype, operator=operator, sizes=sizes))


def attention_seconds(sizes: AttentionSizes, dtype: str, device: Device) -> float:
    """Of fused attention, one way."""
    flops = flops_of(sizes)
    return float(operator_seconds(device, flops=flops, bytes_moved=0.0, dtype=dtype, kind="attention", sizes=sizes))


def kernel_seconds(kernel: MeasuredKernel, device: Device) -> float:
    """Of a kernel of a profile."""
    if kernel.kind == "gemm":
        m, n, k, batch = kernel.sizes
        return product_seconds(ProductSizes(m=m, n=n, k=k, batch=batch), kernel.dtype, device)
    if kernel.kind in ("attention forward", "attention backward"):
        batch, heads, queries, keys, qk_dim, v_dim = kernel.sizes
        sizes = AttentionSizes(
            batch=batch, heads=heads, queries_per_key=1, queries=queries, keys=int(keys), qk_dim=int(qk_dim),
            v_dim=int(v_dim), causal=kernel.causal, backward=kernel.kind.endswith("backward"),
        )  # fmt: skip
        return attention_seconds(sizes, kernel.dtype, device)
    nbytes, row = kernel.sizes
    rows = RowSizes(family=kernel.kind, row=row)
    found = operator_seconds(device, flops=0.0, bytes_moved=nbytes, dtype=kernel.dtype, kind="memory", sizes=rows)
    return float(found)
