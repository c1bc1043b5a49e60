"""Gradients of every output and input are those of the plain model, or an error names what to do."""

from __future__ import annotations

import pytest

from tests.distributed.pipeline_models import CASES
from tests.distributed.pipeline_plans import pipeline_plan
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.gradient_jobs"
PLANS = [{"dp_shard": 2}, {"tp": 2}]


@pytest.mark.exhaustive(sample="{'tp': 2}")
@pytest.mark.parametrize("dims", PLANS, ids=str)
def test_several_losses_and_named_outputs_have_their_gradients(pool: Pool, dims: dict[str, int]) -> None:
    for errors in pool.run(f"{JOBS}:losses", world_size=2, dims=dims):
        assert max(errors.values()) <= 1e-5, errors


@pytest.mark.exhaustive(sample="{'dp_replicate': 2}-{}")
@pytest.mark.parametrize(
    ("dims", "options"),
    [({"dp_replicate": 2}, {}), ({"tp": 2}, {}), ({"dp_shard": 2}, {"mode": "local"}), ({"tp": 2}, {"trains": False})],
    ids=str,
)
def test_inputs_have_their_gradients(pool: Pool, dims: dict[str, int], options: dict[str, object]) -> None:
    for errors in pool.run(f"{JOBS}:of_inputs", world_size=2, dims=dims, **options):
        assert max(errors.values()) <= 1e-5, errors


def test_what_no_backward_graph_gives_is_refused(pool: Pool) -> None:
    for said in pool.run(f"{JOBS}:refused", world_size=2, dims={"dp_shard": 2}):
        assert "the output logits" in said["output"]
        assert "differentiable=['logits']" in said["output"]
        assert "second.weight changed between forward and backward" in said["weights"]
        assert "create_graph=True" in said["twice"]


def test_without_the_guards_gradients_are_others(pool: Pool) -> None:
    for errors in pool.run(f"{JOBS}:unguarded", world_size=2, dims={"dp_shard": 2}):
        assert min(errors.values()) > 1e-2, errors
    assert max(pool.run(f"{JOBS}:gathered_nowhere", world_size=2, dims={"dp_replicate": 2})) > 0.1


@pytest.mark.exhaustive
def test_a_rank_of_stages_refuses_what_counts_its_own_only(pool: Pool) -> None:
    plan = pipeline_plan("gpt2", CASES["gpt2"].halves, "1f1b", 2, {}).to_json()
    for said in pool.run(f"{JOBS}:in_stages", world_size=2, name="gpt2", plan=plan):
        assert "the output logits" in said["logits"]
        assert said["ours"] <= 1e-5
        assert said["copied"]
        for call in ("foreach=None", "foreach=False", "total", "again"):
            assert "autopar.clip_grad_norm_" in said[call], call
    planted = pool.run(f"{JOBS}:in_stages", world_size=2, name="gpt2", plan=plan, planted=True)
    assert {said["logits"] for said in planted} == {""}
    assert min(said["theirs"] for said in planted) > 0.1
