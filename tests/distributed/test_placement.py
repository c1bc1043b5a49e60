"""Plans that place experts: every way to look at parameters and states sees the model's order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed
JOBS = "tests.distributed.placement_jobs"


@pytest.mark.exhaustive(sample="dims0")
@pytest.mark.parametrize("dims", [{"dp_shard": 2, "ep": 2}, {"ep": 2, "tp": 2}, {"ep": 4}])
def test_training_files_and_torch_see_the_models_order(pool: Pool, dims: dict[str, int], tmp_path: Path) -> None:
    results: list[dict[str, float]] = pool.run(
        f"{JOBS}:placed", world_size=4, timeout=300.0, dims=dims, folder=str(tmp_path / "saved")
    )
    for found in results:
        assert {name for name, error in found.items() if not error < 1e-9} == set(), found


def test_an_order_over_two_axes_is_whole_again(pool: Pool) -> None:
    assert pool.run(f"{JOBS}:nested", world_size=4) == [0.0] * 4
