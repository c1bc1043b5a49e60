"""Rates of a busy device: lower clocks, other attention kernels, and neither in the ablation."""

from __future__ import annotations

import pytest

from autopar.cost_models.operator_costs import rates_of
from autopar.cost_models.sustained import attention_speed, sustained
from autopar.hardware.device_curves import physics_curves, shared_curves
from autopar.hardware.devices import preset_device


def _rates(name: str) -> tuple[float, float]:
    """(in a short loop, in a step) FLOP/s of bf16 products."""
    device, curves = preset_device(name), shared_curves(name)
    short = rates_of(device, curves, "bfloat16")
    return short.flops_per_second, sustained(short, curves).flops_per_second


def test_a_busy_h100_lowers_its_clock_and_an_a100_does_not() -> None:
    short, step = _rates("H100-SXM")
    assert step == pytest.approx(0.88 * short)
    assert _rates("A100-80")[0] == _rates("A100-80")[1]


def test_less_power_is_a_lower_clock_by_the_cube_root() -> None:
    assert _rates("H100-96")[1] == pytest.approx(_rates("H100-SXM")[1] * (500 / 700) ** (1 / 3), rel=1e-3)


def test_older_attention_kernels_are_slower_on_newer_devices() -> None:
    hopper, ampere = shared_curves("H100-SXM"), shared_curves("A100-80")
    assert (
        attention_speed("flash1", hopper) < attention_speed("flash2", hopper) < attention_speed("vendor", hopper) == 1
    )
    assert attention_speed("flash2", ampere) == 1


def test_the_ablation_knows_neither() -> None:
    curves = physics_curves("H100-SXM")
    rates = rates_of(preset_device("H100-SXM"), curves, "bfloat16")
    assert sustained(rates, curves) == rates
    assert attention_speed("flash1", curves) == 1
