"""Ranks take the branches of rank 0's example, compute what the plain model does, and refuse another branch alike."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.branch_jobs import Branched
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("detr", {"dims": {"tp": 2}}, "if self.training and not torch.isfinite(hidden).all():) read True, False now"),
        ("conformer", {"dims": {"dp_replicate": 2}}, "int(torch.max(lengths).item())) read 5, 6 now"),
    ],
)
def test_all_ranks_take_one_branch_and_refuse_another(
    pool: Pool, name: str, options: dict[str, Any], said: str
) -> None:
    found: list[Branched] = pool.run(
        "tests.distributed.branch_jobs:branches", world_size=2, timeout=120.0, name=name, **options
    )
    for each in found:
        assert max(each.errors) < 1e-6
        assert each.splits
        assert said in each.refused
        assert each.after == 0.0
    assert found[0].refused == found[1].refused
