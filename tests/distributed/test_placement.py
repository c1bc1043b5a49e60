"""Plans that place experts: every way to look at parameters and states sees the model's order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


@pytest.mark.exhaustive(sample="dims0")
@pytest.mark.parametrize("dims", [{"dp_shard": 2, "ep": 2}, {"ep": 2, "tp": 2}, {"ep": 4}])
def test_experts_change_places_between_steps_and_training_goes_on(pool: Pool, dims: dict[str, int]) -> None:
    results: list[dict[str, Any]] = pool.run(f"{JOBS}:switched", world_size=4, timeout=300.0, dims=dims)
    for found in results:
        assert {name for name, error in found["errors"].items() if not error < 1e-9} == set(), found
        words = "differs in replicated_experts", "has 2 experts, the model 8", "no module with experts"
        assert all(word in text for word, text in zip(words, found["refused"], strict=True)), found["refused"]
    order, each = results[0]["order"], 8 // dims["ep"]
    stays = [len({*order[at : at + each]} & {*range(at, at + each)}) for at in range(0, 8, each)]
    assert {found["came"]["up"] for found in results} == {each - one for one in stays}, "the others alone"


@pytest.mark.exhaustive(sample="weights alone")
@pytest.mark.parametrize("wrong", ["nothing moves", "weights alone"])
def test_experts_that_are_left_behind_are_noticed(pool: Pool, wrong: str) -> None:
    (found, *_) = pool.run(f"{JOBS}:switched", world_size=2, timeout=300.0, dims={"ep": 2}, wrong=wrong)
    assert found["errors"]["values"] > 1e-4


@pytest.mark.exhaustive
def test_placed_experts_go_to_another_plan_and_back(pool: Pool) -> None:
    for found in pool.run(f"{JOBS}:replanned", world_size=2, dims={"ep": 2}, other={"dp_shard": 2}):
        assert max(found.values()) < 1e-9, found
