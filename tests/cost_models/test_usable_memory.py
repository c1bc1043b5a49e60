"""What a plan may fill of a device."""

from __future__ import annotations

from autopar.cost_models.usable_memory import usable_bytes


def test_a_cpu_plan_may_use_all_memory_and_a_gpu_plan_less() -> None:
    assert usable_bytes(2**30, "cpu") == 2**30
    assert 75 * 10**9 < usable_bytes(80 * 10**9, "cuda") < 78 * 10**9
