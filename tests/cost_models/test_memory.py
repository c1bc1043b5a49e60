import random

import pytest
import torch

from autopar.cost_models.memory import (
    OPTIMIZER_STATE_BYTES,
    LiveRange,
    measured_state_bytes,
    optimizer_state_bytes,
    peak_over_time,
    usable_bytes,
)
from autopar.errors import ConfigurationError


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_the_one_of_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    ranges = []
    for i in range(draw.randint(1, 12)):
        first = draw.randint(-3, 10)
        ranges.append((f"t{i}", draw.randint(0, 100), first, first + draw.randint(0, 6)))
    alive = {t: sum(b for _, b, first, last in ranges if first <= t <= last) for t in range(-3, 17)}
    peak = peak_over_time(ranges)
    assert peak.peak_bytes == max(alive.values())
    assert peak.index == min(
        t for t in alive if alive[t] == peak.peak_bytes and t >= min(r[2] for r in ranges)
    )
    assert sum(live.bytes for live in peak_over_time(ranges, largest=99).contributors) == peak.peak_bytes


def test_contributors_are_the_largest_live_buffers() -> None:
    ranges = [
        ("weight", 10, 0, 9),
        ("early", 50, 0, 1),
        ("big", 30, 2, 5),
        ("small", 1, 3, 3),
        ("late", 35, 5, 6),
    ]
    peak = peak_over_time(ranges, largest=2)
    assert (peak.peak_bytes, peak.index) == (75, 5)
    assert peak.contributors == (LiveRange("late", 35, 5, 6), LiveRange("big", 30, 2, 5))


def test_no_range_has_no_peak_and_a_reversed_one_is_an_error() -> None:
    assert peak_over_time([]).peak_bytes == 0
    with pytest.raises(ValueError, match="x ends at 1"):
        peak_over_time([("x", 1, 2, 1)])


@pytest.mark.parametrize(
    "optimizer", [c for n in OPTIMIZER_STATE_BYTES if (c := getattr(torch.optim, n, None)) is not None]
)
def test_the_table_holds_what_each_torch_optimizer_allocates(optimizer) -> None:
    assert optimizer_state_bytes(optimizer) == measured_state_bytes(optimizer)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adam, {"amsgrad": True}),
    ],
)
def test_options_that_add_state_are_counted(optimizer, options) -> None:
    assert optimizer_state_bytes(optimizer, options=options) == measured_state_bytes(
        optimizer, options=options
    )


def test_state_follows_the_dtype_and_a_master_copy_adds_four_bytes() -> None:
    assert optimizer_state_bytes("AdamW", parameter_dtype=torch.bfloat16) == 4
    assert measured_state_bytes(torch.optim.AdamW, parameter_dtype=torch.bfloat16) == 4
    assert optimizer_state_bytes("adamw", parameter_dtype=torch.bfloat16, float32_master=True) == 12
    assert optimizer_state_bytes("AdamW", float32_master=True) == 8


def test_an_unknown_class_is_measured_and_an_unknown_name_is_an_error() -> None:
    class Heavy(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].update(
                    a=torch.zeros_like(parameter), b=parameter.double(), step=torch.zeros(())
                )

    assert optimizer_state_bytes(Heavy) == 12
    with pytest.raises(ConfigurationError, match="Heavy"):
        optimizer_state_bytes("Heavy")


def test_a_cpu_plan_may_use_all_memory_and_a_gpu_plan_less() -> None:
    assert usable_bytes(2**30, "cpu") == 2**30
    assert 75 * 10**9 < usable_bytes(80 * 10**9, "cuda") < 78 * 10**9
