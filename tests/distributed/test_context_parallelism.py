"""Every way of the benchmark of context parallelism trains the same model: equal losses, or it compares nothing."""

from __future__ import annotations

import pytest

from benchmarks.plan_quality.rows import LOSS_TOLERANCE, loss_difference
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed


def test_all_ways_have_the_losses_of_one_rank(pool: Pool) -> None:
    job = "tests.distributed.context_jobs:losses_of_all_ways"
    losses: dict[str, list[float]] = pool.run(job, world_size=2, spoiled="ulysses by hand")[0]
    wrong = {name for name, each in losses.items() if loss_difference(each, losses["alone"]) > LOSS_TOLERANCE}
    assert wrong == {"ulysses by hand"}, "only the one that was given another sequence differs"
    assert {"autopar", "autopar as ulysses", "autopar as gather", "ring by hand"} <= set(losses)
