"""Measured curves of operators: what stands on them, between them and beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_models.machine_profile import curves_through
from autopar.cost_models.operator_costs import OPTIMIZER, SGD, STREAMING, operator_seconds, optimizer_seconds
from autopar.hardware.cluster import Cluster

CPU = Cluster.parse("4 cpu").device
SAMPLES = [("tanh", 1e4, 20e-6), ("tanh", 1e6, 2e-3), ("tanh", 1e4, 30e-6), ("mm", 1e6, 1e-5), (OPTIMIZER, 1e3, 2e-4)]
MEASURED = replace(CPU, operators=curves_through(SAMPLES, "float32"))


def _tanh(nbytes: float, dtype: str = "float32", operator: str = "tanh") -> float:
    return float(operator_seconds(MEASURED, flops=0, bytes_moved=nbytes, dtype=dtype, kind="memory", operator=operator))


def test_a_curve_passes_its_fastest_samples() -> None:
    assert _tanh(1e4) == pytest.approx(20e-6)
    assert _tanh(1e6) == pytest.approx(2e-3)


def test_between_samples_it_is_straight_in_logarithms() -> None:
    assert _tanh(1e5) == pytest.approx(np.sqrt(20e-6 * 2e-3))


def test_above_it_grows_with_the_work_and_below_it_is_overhead() -> None:
    assert _tanh(4e6) == pytest.approx(8e-3)
    assert _tanh(10.0) == pytest.approx(20e-6)


def test_other_operators_and_dtypes_have_the_ceilings() -> None:
    bare = float(operator_seconds(CPU, flops=0, bytes_moved=1e5, dtype="float64", kind="memory"))
    assert _tanh(1e5, dtype="float64") == bare
    assert _tanh(1e5, operator="gelu") == float(
        operator_seconds(CPU, flops=0, bytes_moved=1e5, dtype="float32", kind="memory")
    )


def test_where_streaming_was_measured_it_prices_what_memory_bounds_and_nobody_measured() -> None:
    device = replace(
        CPU, operators=curves_through([*SAMPLES, (STREAMING, 1e3, 8e-6), (STREAMING, 1e6, 4e-5)], "float32")
    )
    seconds = operator_seconds(
        device, flops=0, bytes_moved=[1e3, 1e6], dtype="int64", kind="memory", operator="scatter"
    )
    assert seconds.tolist() == pytest.approx([8e-6, 4e-5])
    folded = operator_seconds(device, flops=0, bytes_moved=1e6, dtype="int64", kind="memory", kernels=0)
    assert folded == 0.0
    product = operator_seconds(device, flops=1e6, bytes_moved=1.0, dtype="float64")
    assert product == operator_seconds(CPU, flops=1e6, bytes_moved=1.0, dtype="float64")


def test_products_are_measured_by_their_flops() -> None:
    seconds = operator_seconds(MEASURED, flops=[1e6, 2e6], bytes_moved=[1e9, 1.0], dtype="float32", operator="mm")
    assert seconds.tolist() == pytest.approx([1e-5, 2e-5])


def test_an_update_costs_its_dispatch_and_a_frozen_parameter_nothing() -> None:
    assert optimizer_seconds(MEASURED, [10.0, 0.0]).tolist() == pytest.approx([2e-4, 0.0])
    assert optimizer_seconds(CPU, 1e6) == pytest.approx(1e6 / CPU.memory_bytes_per_second)


def test_an_update_by_sgd_has_a_curve_of_its_own_where_that_was_measured() -> None:
    assert float(optimizer_seconds(MEASURED, 1e3, SGD)) == pytest.approx(2e-4)
    measured = replace(CPU, operators=curves_through([*SAMPLES, (SGD, 1e3, 5e-5)], "float32"))
    assert [float(optimizer_seconds(measured, 1e3, curve)) for curve in (SGD, OPTIMIZER)] == pytest.approx([5e-5, 2e-4])
