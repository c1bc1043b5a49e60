"""What a plan does in a second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.hardware.cluster import Cluster
from autopar.plans.step_rates import step_rates
from tests.plans.test_plan_text import small_plan


def test_tokens_are_counted_where_an_input_has_rows_of_whole_numbers() -> None:
    inputs = {"pixels": [[4, 3, 8], "torch.float32"], "ids": [[4, 16], "torch.int64"]}
    rates = step_rates(replace(small_plan(), question={"inputs": inputs}))
    assert (rates.count, rates.unit, rates.device) == (64, "tokens", "GPU")
    assert rates.per_second(0.5) == 128.0


def test_samples_are_counted_else_and_nothing_where_nothing_is_said() -> None:
    rates = step_rates(replace(small_plan(), question={"inputs": {"pixels": [[4, 3, 8], "torch.float32"]}}))
    assert (rates.count, rates.unit) == (4, "samples")
    unknown = step_rates(small_plan())
    assert (unknown.count, unknown.per_second(1.0), unknown.of_peak(1.0)) == (None, None, None)


def test_the_share_of_the_peak_counts_micro_batches_and_devices_at_the_precision() -> None:
    plan = replace(small_plan(), statistics={"flops_of_pass": 1e12}, question={"precision": "bf16"})
    rates, parts = step_rates(plan), step_rates(replace(plan, micro_batches=4))
    device = Cluster.parse(plan.cluster).device
    assert rates.peak == 8 * device.flops_per_second["bfloat16"]
    assert rates.of_peak(0.01) == pytest.approx(1e12 / 0.01 / rates.peak)
    assert parts.of_peak(0.01) == pytest.approx(4e12 / 0.01 / rates.peak)
    wide = step_rates(replace(plan, question={"precision": "fp32"}))
    assert wide.peak is not None
    assert wide.peak < rates.peak
    assert step_rates(replace(plan, cluster="a lab")).peak is None


def test_the_peak_is_that_of_the_dtype_in_which_the_model_multiplies() -> None:
    """A model in bf16 needs no precision="bf16": beside the fp32 peak it ran at nine times what the device can."""
    counted = {"flops_of_pass": 1e12, "dtype_of_flops": "bfloat16"}
    rates = step_rates(replace(small_plan(), statistics=counted, question={"precision": "fp32"}))
    assert rates.dtype == "bfloat16"
    assert rates.peak == 8 * Cluster.parse(small_plan().cluster).device.flops_per_second["bfloat16"]


def test_a_step_of_no_time_has_no_rate() -> None:
    assert step_rates(small_plan()).per_second(0.0) is None
