"""Every way of the benchmark of expert parallelism trains the same model: equal losses, or it compares nothing."""

from __future__ import annotations

import pytest
from torch import Tensor

from benchmarks.plan_quality.rows import LOSS_TOLERANCE, loss_difference
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed
JOBS = "tests.distributed.expert_parallelism_jobs"


def test_all_ways_have_the_losses_of_one_rank(pool: Pool) -> None:
    losses: dict[str, list[float]] = pool.run(f"{JOBS}:losses_of_all_ways", world_size=4)[0]
    differences = {name: loss_difference(each, losses["alone"]) for name, each in losses.items()}
    assert max(differences.values()) <= LOSS_TOLERANCE, differences
    assert {"autopar", "autopar as dispatch", "dispatch by hand", "replicated by hand"} <= set(losses)


@pytest.mark.parametrize("spoiled", [False, True])
def test_dispatch_by_hand_has_the_gradients_of_one_rank(pool: Pool, spoiled: bool) -> None:
    ranks: list[tuple[dict[str, Tensor], dict[str, Tensor]]]
    ranks = pool.run(f"{JOBS}:gradients_by_hand", world_size=4, spoiled=spoiled)
    for found, wanted in ranks:
        assert set(found) == set(wanted)
        errors = {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in found}
        wrong = {name for name, error in errors.items() if not error < 1e-12}
        assert wrong == ({name for name in found if name.startswith("own.")} if spoiled else set()), errors
