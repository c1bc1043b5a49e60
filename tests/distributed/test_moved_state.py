"""A run goes from one plan to another in memory, as if it had loaded a checkpoint there."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.moved_state_jobs:"


@pytest.mark.exhaustive(sample="dims1-2")
@pytest.mark.parametrize(
    ("dims", "processes"),
    [
        ([{"dp_replicate": 2}, {"tp": 2}, {"pp": 2}], 2),
        ([{"pp": 2}, {"dp_shard": 2}, {"pp": 2}], 2),
        ([{"tp": 2}, {"dp_replicate": 2}, {"dp_shard": 2}], 2),
        ([{"pp": 2, "tp": 2}, {"dp_shard": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}], 4),
    ],
)
def test_training_goes_on_as_behind_a_checkpoint_under_every_plan(
    pool: Pool, tmp_path: Path, dims: list[dict[str, int]], processes: int
) -> None:
    for found in pool.run(JOBS + "goes_on", world_size=processes, path=str(tmp_path / "run"), dims=dims):
        assert all(found["same"]), found["same"]
        assert found["objects"] or any("pp" in each for each in dims)
        assert all(counted == predicted for counted, predicted in found["counted"])
        assert all(sent == least for sent, least in found["all"])
        assert all(seconds >= 0.0 for seconds in found["predicted seconds"])
        if dims[0] == {"dp_replicate": 2}:
            assert found["all"][0][0] == 0  # of what every rank has, nothing is sent


def test_a_plan_for_inference_is_taken_and_left(pool: Pool) -> None:
    job = JOBS + "infers_in_between"
    for found in pool.run(job, world_size=2, dims={"dp_shard": 2}, inference={"tp": 2}):
        assert all(found.values()), found


FIRST = [{"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"tp": 4}]
OTHER = [{"tp": 4}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 4}]


@pytest.mark.exhaustive(sample="two-stages")
@pytest.mark.parametrize(
    ("first", "other"),
    [
        pytest.param({"pp": 2}, {"tp": 2}, id="two-stages"),
        pytest.param({"pp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}, id="between-stages"),
        *(
            pytest.param(first, other, id=f"first{i}-other{j}")
            for (i, first), (j, other) in itertools.product(enumerate(FIRST), enumerate(OTHER))
        ),
    ],
)
def test_state_and_gradients_come_back_as_they_were(pool: Pool, first: dict[str, int], other: dict[str, int]) -> None:
    processes = math.prod(first.values())
    for found in pool.run(JOBS + "there_and_back", world_size=processes, first=first, other=other):
        assert all(found.values()), found


def test_a_block_that_is_copied_wrong_would_be_seen(pool: Pool) -> None:
    found = pool.run(JOBS + "there_and_back", world_size=2, first={"dp_shard": 2}, other={"tp": 2}, spoiled=True)
    assert not all(each["state"] for each in found)


def test_what_cannot_move_is_refused_with_the_next_step(pool: Pool) -> None:
    for heard in pool.run(JOBS + "refused", world_size=2, dims={"dp_replicate": 2}, other={"tp": 2}):
        processes, waiting, unchanged, unknown, left_behind = heard
        assert "the plan is for 4 devices" in processes
        assert "gradients of no_sync() wait for their sum" in waiting
        assert unchanged == "unchanged"
        assert "average of" in unknown
        assert "does not say how it lies across ranks" in unknown
        assert "write module.replan(plan, optimizer)" in left_behind


def test_an_optimizer_has_its_parameters_in_the_order_of_the_model_behind_stages(pool: Pool) -> None:
    for found in pool.run(JOBS + "between_hands", world_size=2, stages={"pp": 2}, whole={"tp": 2}):
        assert found["held"] == found["names"] == found["model"]
        assert "was not handed over when parameters of the module went to other ranks" in found["heard"]


def test_a_state_is_resharded_into_blocks(pool: Pool) -> None:
    assert pool.run(JOBS + "resharded", dims={"dp_shard": 2, "tp": 2}, other={"tp": 4}) == [[]] * 4


def test_ranks_that_name_different_plans_hear_so(pool: Pool) -> None:
    heard = pool.run(JOBS + "resharded_by_two_plans", world_size=2, dims={"dp_shard": 2}, other={"tp": 2})
    assert all("were given another plan than the others" in each for each in heard)


@pytest.mark.exhaustive(sample="small0")
@pytest.mark.parametrize(
    ("small", "large"), [({"dp_shard": 2}, {"dp_shard": 2, "tp": 2}), ({"tp": 2}, {"dp_shard": 4})]
)
def test_a_run_goes_on_with_more_processes_and_with_fewer(
    pool: Pool, tmp_path: Path, small: dict[str, int], large: dict[str, int]
) -> None:
    found = pool.run(JOBS + "grows_and_shrinks", path=str(tmp_path / "run"), small=small, large=large)
    assert [list(each) for each in found] == [["grown", "shrunk"]] * 2 + [["grown"]] * 2
    assert all(all(same) for each in found for same in each.values()), found
