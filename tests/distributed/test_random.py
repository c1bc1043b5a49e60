"""Random operators draw the same on one process and on several, forward and backward."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

NAMES = (
    "dropout",
    "attention",
    "checkpoint",
    "dropout1d",
    "randn_like",
    "bernoulli",
    "exponential_",
    "randperm",
    "multinomial",
    "gumbel_softmax",
    "rrelu",
    "stochastic_depth",
)


PLANS = [(2, {"dp_shard": 2}), (4, {"dp_shard": 4}), (4, {"dp_shard": 2, "tp": 2})]


JOB = "tests.distributed.random_jobs:steps"


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, list[float]]:
    found: dict[str, list[float]] = pool.run(JOB, world_size=1, names=NAMES, dims=None)[0]
    return found


@pytest.mark.exhaustive(sample="4-dims1")
@pytest.mark.parametrize(("processes", "dims"), PLANS)
def test_several_processes_draw_what_one_draws(
    pool: Pool, alone: dict[str, list[float]], processes: int, dims: dict[str, int]
) -> None:
    together = pool.run(JOB, world_size=processes, names=NAMES, dims=dims)[0]
    for name, expected in alone.items():
        assert expected[0] != expected[1], f"{name}: every step draws anew"
        assert together[name] == pytest.approx(expected, rel=1e-5, abs=1e-7), name
