"""Ranks that build the model from other seeds train the weights of rank 0, or are told that they differ."""

from __future__ import annotations

import pytest

from tests.distributed.pipeline_models import CASES
from tests.distributed.pipeline_plans import pipeline_plan
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.weight_jobs"


@pytest.mark.exhaustive(sample="{'dp_shard': 4}")
@pytest.mark.parametrize("dims", [{"dp_replicate": 4}, {"dp_shard": 4}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_all_ranks_have_the_weights_of_the_first(pool: Pool, dims: dict[str, int]) -> None:
    assert max(pool.run(f"{JOBS}:seeded_apart", dims=dims)) == 0.0


def test_without_the_exchange_they_differ(pool: Pool) -> None:
    assert max(pool.run(f"{JOBS}:seeded_apart", dims={"dp_replicate": 4}, planted=True)) > 0.1


def test_strided_blocks_and_buffers_are_those_of_the_first(pool: Pool) -> None:
    for error, strided in pool.run(f"{JOBS}:fused_apart", world_size=2, dims={"tp": 2}):
        assert strided
        assert error == 0.0


def test_every_stage_has_the_weights_of_the_first_rank(pool: Pool) -> None:
    plan = pipeline_plan("gpt2", CASES["gpt2"].halves, "1f1b", 2, {"dp_shard": 2}).to_json()
    assert max(pool.run(f"{JOBS}:stages_apart", name="gpt2", plan=plan)) == 0.0


@pytest.mark.exhaustive
def test_a_check_names_ranks_and_tensors(pool: Pool) -> None:
    for message in pool.run(f"{JOBS}:checked", seeds=[0, 0, 3, 0]):
        assert "5 of 9 tensors of rank 2 are not those of rank 0 (embedding.weight, block.0.weight" in message, message
        assert "torch.manual_seed" in message
    assert set(pool.run(f"{JOBS}:checked", seeds=[5, 5, 5, 5])) == {""}
