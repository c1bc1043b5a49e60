"""Stages that make runs of blocks again, more than once too, compute what stages that save everything compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.plans.parallel_plan import Plan
from tests.distributed.offload_jobs import on_host
from tests.distributed.pool import Pool
from tests.distributed.spanned_jobs import Spanned
from tests.planner.pipelines.chains import ACTIVATION, most_passes, planned

pytestmark = pytest.mark.distributed

JOB = "tests.distributed.spanned_jobs:chain_under"


def check(pool: Pool, plan: Plan) -> None:
    found: list[Spanned] = pool.run(JOB, world_size=plan.num_ranks, plan=plan.to_json())
    for each in found:
        assert each.loss <= 1e-14
        assert each.gradients <= 1e-12
        assert not each.different


@pytest.mark.exhaustive(sample="1f1b-6.5-1")
@pytest.mark.parametrize(
    ("schedule", "activations", "devices"),
    [("1f1b", 6.5, 1), ("1f1b", 4.0, 2), ("gpipe", 14.0, 1), ("interleaved", 14.0, 1)],
)
def test_spans_in_stages_give_the_bits_of_saved_values(
    pool: Pool, schedule: str, activations: float, devices: int
) -> None:
    plan = planned(activations, schedule, devices)
    assert most_passes(plan) >= 1
    check(pool, plan)


@pytest.mark.exhaustive(sample="1")
@pytest.mark.parametrize("devices", [1, 2])
def test_what_waits_on_the_host_gives_the_bits_of_what_stays(pool: Pool, devices: int) -> None:
    plan = planned(8.0 / devices, devices=devices, cluster=f"{2 * devices} H100-SXM", offload="activations")
    assert plan.saved_on_host
    check(pool, plan.with_(kernel_backend="eager"))


def test_borders_of_spans_wait_on_the_host_those_of_stages_among_them(pool: Pool) -> None:
    plan = on_host(planned(6.5), ahead=2.0 * ACTIVATION)
    kept = {name: replace(parameter, stored_on="device") for name, parameter in plan.parameters.items()}
    assert most_passes(plan) > 1
    assert plan.saved_on_host
    check(pool, replace(plan, parameters=kept))


def test_what_is_given_up_at_any_moment_is_made_again(pool: Pool) -> None:
    """By hand: everything is given up before every second operator of backward; slow, and right."""
    plan = planned(14.0)
    moments = tuple(name for name in plan.operators if name.endswith("/bwd"))[::2]
    operators = {
        name: replace(operator, recompute_at=moments if operator.recompute else ())
        for name, operator in plan.operators.items()
    }
    check(pool, replace(plan, operators=operators))
