"""What a plan may fill of a device."""

from __future__ import annotations

from autopar.cost_models.usable_memory import communicator_bytes, usable_bytes


def test_a_cpu_plan_may_use_all_memory_and_a_gpu_plan_less() -> None:
    assert usable_bytes(2**30, "cpu") == 2**30
    assert 75 * 10**9 < usable_bytes(80 * 10**9, "cuda") < 78 * 10**9


def test_nccl_holds_more_for_a_group_than_for_a_pair_and_nothing_for_one_or_on_cpus() -> None:
    assert 0 == communicator_bytes(1, "cuda") < communicator_bytes(2, "cuda") < communicator_bytes(8, "cuda")
    assert communicator_bytes(8, "cpu") == 0


def test_the_communicators_of_a_plans_groups_are_off_what_it_may_fill() -> None:
    without = usable_bytes(80 * 10**9, "cuda")
    assert without - usable_bytes(80 * 10**9, "cuda", [16, 8]) == 2 * communicator_bytes(8, "cuda") > 0
    assert usable_bytes(2**30, "cpu", [16, 8]) == 2**30
