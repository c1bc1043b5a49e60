"""The memory of the host as a choice: what fits with it, how its copies hide, what the device then holds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConfigurationError, InfeasibleError
from autopar.hardware.cluster import Cluster
from autopar.hardware.hosts import USABLE_SHARE, Host, HostLink
from autopar.planner.one_mesh.host_labels import Way, noticed
from autopar.planner.problem.prices import Floats
from autopar.plans.parallel_plan import Plan
from autopar.plans.rung_names import host_bytes
from benchmarks.emulated_device.budget import OutOfMemory
from benchmarks.emulated_device.device import EmulatedDevice

DEPTH, ROWS, WIDTH = 12, 512, 64
SAVED = ROWS * WIDTH * 8
STATES = DEPTH * WIDTH * (WIDTH + 1) * 8 * 4
"""Parameters, gradients and the two moments of AdamW."""


def link(rate: float = 1e9) -> HostLink:
    """Both ways at once."""
    return HostLink(
        name="test", latency_seconds=1e-6, to_host_bytes_per_second=rate, from_host_bytes_per_second=rate,
        both_bytes_per_second=2 * rate,
    )  # fmt: skip


def cluster(rate: float = 1e9) -> Cluster:
    """One device with a host of its own."""
    return replace(
        Cluster.parse("1 cpu"), host=Host(memory_bytes=1 << 34, memory_bytes_per_second=1e10, link=link(rate))
    )


class Chain(nn.Module):
    """forward(x (512, 64)) -> mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


def chain() -> tuple[Chain, torch.Tensor]:
    torch.manual_seed(0)
    return Chain().double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)


@cache
def planned(limit: int, rate: float = 1e9, **options: Any) -> Plan:
    model, x = chain()
    return autopar.plan(
        model, (x,), cluster=cluster(rate), optimizer=torch.optim.AdamW, memory_limit=f"{limit}B", micro_batches=1,
        with_baselines=False, **{"mode": "fast", **options},
    )  # fmt: skip


def on_host(plan: Plan) -> tuple[int, int]:
    """How many parameters are stored, and operators saved, on the host."""
    return sum(each.stored_on == "host" for each in plan.parameters.values()), len(plan.saved_on_host)


SMALL = STATES // 2 + 4 * SAVED


def test_what_fits_nowhere_else_waits_on_the_host() -> None:
    plan = planned(SMALL, offload="all")
    parameters, saved = on_host(plan)
    assert parameters
    assert plan.predicted.peak_bytes <= SMALL
    assert saved + len(plan.recomputed) > 0
    with pytest.raises(InfeasibleError):
        planned(SMALL)


def test_nothing_waits_there_where_memory_suffices() -> None:
    assert on_host(planned(4 * STATES, offload="all")) == (0, 0)


def test_only_what_may_wait_does() -> None:
    enough = STATES + 5 * SAVED
    assert on_host(planned(enough, offload="activations", recompute="none"))[0] == 0
    assert on_host(planned(STATES + 12 * SAVED, offload="parameters", recompute="none"))[1] == 0


def test_the_memory_of_the_host_is_a_limit_too() -> None:
    there = cluster()
    assert there.host is not None
    small = replace(there, host=replace(there.host, memory_bytes=SAVED))
    model, x = chain()
    with pytest.raises(InfeasibleError):
        autopar.plan(model, (x,), cluster=small, optimizer=torch.optim.AdamW, memory_limit=f"{SMALL}B",
                     micro_batches=1, offload="all", mode="fast", with_baselines=False)  # fmt: skip


def test_beside_the_values_of_a_long_sequence_parameters_may_still_wait_there() -> None:
    sizes = (1e6, 1e6, 1.0, 1e12, 1e12, 1e6)
    moved: dict[int, dict[Way, Floats]] = {
        index: {("forward", "from_host"): np.array([size])} for index, size in enumerate(sizes)
    }
    is_parameter = [index < 3 for index in moved]
    assert set(noticed(moved, is_parameter)) == {0, 1, 3, 4}


@pytest.mark.parametrize("values", [5, 7])
def test_where_the_host_may_be_used_the_step_is_never_longer_than_without_it(values: int) -> None:
    enough = STATES + values * SAVED
    alone = planned(enough, 1e8).predicted.step_seconds
    assert planned(enough, 1e8, offload="activations").predicted.step_seconds <= alone


def test_over_a_slow_link_less_is_copied_and_more_made_again() -> None:
    enough = STATES + 9 * SAVED
    fast, slow = (planned(enough, rate, offload="activations") for rate in (1e10, 1e8))
    assert len(fast.saved_on_host) > len(slow.saved_on_host)
    assert len(fast.recomputed) < len(slow.recomputed)
    assert fast.predicted.step_seconds < slow.predicted.step_seconds


def test_the_device_holds_what_was_predicted_and_computes_the_same() -> None:
    plan = planned(SMALL, offload="all")
    (model, x), (plain, _) = chain(), chain()
    plain(x).backward()
    module = autopar.compile(model, (x,), plan=plan)
    here, there = (
        [module.get_parameter(name) for name, each in plan.parameters.items() if each.stored_on == memory]
        for memory in ("device", "host")
    )
    states = sum(each.nbytes for each in here) * 2  # the moments of AdamW, which this test does not keep
    module(x).backward()
    for parameter, expected in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)
    module.zero_grad()
    predicted = round(plan.predicted.peak_bytes) - states
    assert _peak(module, [x, *here], there, 1.001 * predicted) == pytest.approx(predicted, rel=0.001)
    with pytest.raises(OutOfMemory):
        _peak(module, [x, *here], there, 0.99 * predicted)


def _peak(module: nn.Module, here: list[torch.Tensor], there: list[torch.Tensor], limit: float) -> int:
    """Most bytes of the emulated device in a step. here, there: what lies on it, and on its host, all the time."""
    module.zero_grad()
    with EmulatedDevice(link(), device_bytes=round(limit), known=here) as device:
        device.budget.on_host(*there)
        module(here[0]).backward()
    return device.budget.peak_bytes


def test_a_plan_with_a_host_is_explained_and_read_again() -> None:
    plan = Plan.from_json(planned(SMALL, offload="all").to_json())
    name = next(name for name, each in plan.parameters.items() if each.stored_on == "host")
    assert "lies on the host" in str(plan.explain(name))
    assert on_host(plan) == on_host(planned(SMALL, offload="all"))


def test_a_cluster_without_a_host_says_so() -> None:
    model, x = chain()
    with pytest.raises(ConfigurationError, match="says nothing of its host"):
        autopar.plan(model, (x,), cluster="1 cpu", offload="all")
    with pytest.raises(ConfigurationError, match="write one of none, activations"):
        autopar.plan(model, (x,), cluster="1 cpu", offload="activation")


def test_stages_are_not_planned_with_it_in_silence() -> None:
    model, x = chain()
    with pytest.raises(ConfigurationError, match="stages keep their parameters on the device"):
        autopar.plan(model, (x,), cluster="8 H100-SXM", dims={"pp": 2, "dp_shard": 4}, offload="all",
            with_baselines=False)


class Blocks(nn.Module):
    """forward(x (512, 64)) -> mean of squares; a block can be made again by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def roomy(room: int, model: nn.Module, limit: int, **options: Any) -> Plan:
    """Planned beside a host whose only device may have `room` bytes there, over a link that is fast."""
    x = chain()[1]
    whole = cluster(1e11)
    assert whole.host is not None
    small = replace(whole, host=replace(whole.host, memory_bytes=round(room / USABLE_SHARE)))
    return autopar.plan(
        model, (x,), cluster=small, optimizer=torch.optim.AdamW, memory_limit=f"{limit}B", micro_batches=1,
        with_baselines=False, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_no_more_waits_on_the_host_than_there_is_room_for() -> None:
    limit = 50 * SAVED
    free = roomy(1 << 34, Blocks().double(), limit, offload="activations")
    room = round(0.5 * host_bytes(free.predicted))
    plan = roomy(room, Blocks().double(), limit, offload="activations")
    assert host_bytes(plan.predicted) <= room
    assert plan.predicted.peak_bytes <= limit
    assert len(plan.recomputed) > len(free.recomputed)
