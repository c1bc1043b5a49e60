"""The baselines of the plan quality benchmark train the same model: equal losses, or the comparison says nothing."""

from __future__ import annotations

import pytest

from benchmarks.plan_quality.rows import LOSS_TOLERANCE, loss_difference
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed


@pytest.mark.exhaustive
def test_all_baselines_have_the_losses_of_one_rank(pool: Pool) -> None:
    losses: dict[str, list[float]] = pool.run("tests.distributed.baseline_jobs:losses_of_all", halved="ddp")[0]
    alone = losses["alone"]
    wrong = {name for name, each in losses.items() if loss_difference(each, alone) > LOSS_TOLERANCE}
    assert wrong == {"ddp"}, "only the one that was given another batch differs"
