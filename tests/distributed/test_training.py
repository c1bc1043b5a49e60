"""Compiled modules train like the plain model, under the baselines and the planner's own choice."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

PLANS = [None, {"dp_replicate": 4}, {"dp_shard": 4}, {"tp": 4}, {"dp_shard": 2, "tp": 2}]
REPLICATED, BOTH = {"dp_replicate": 4}, {"dp_shard": 2, "tp": 2}
"""Parameters whole on every rank, and split over either axis."""


@pytest.mark.exhaustive(sample="{'dp_replicate': 4}")
@pytest.mark.parametrize("dims", PLANS, ids=str)
def test_training_equals_the_plain_model(pool: Pool, dims: dict[str, int] | None) -> None:
    results = pool.run("tests.distributed.training_jobs:train", dims=dims)
    for result in results:
        assert max(result["loss_errors"]) <= 1e-6
        assert max(result["gradient_errors"]) <= 1e-5
        assert result["loss"] == results[0]["loss"]
        assert result["names"]
        assert result["keys"]
        assert result["dtensors"]
        assert result["tied"]
        assert result["plain_loss"]
        assert result["meshes"] == 1


@pytest.mark.exhaustive(sample="{'dp_replicate': 4}-True")
@pytest.mark.parametrize(
    ("dims", "quiet"), [(BOTH, False), (BOTH, True), (REPLICATED, True), ({"dp_shard": 4}, True)], ids=str
)
def test_accumulated_gradients_are_the_sum(pool: Pool, dims: dict[str, int], quiet: bool) -> None:
    assert max(pool.run("tests.distributed.training_jobs:accumulate", dims=dims, quiet=quiet)) <= 1e-5


@pytest.mark.parametrize(("dims", "replayed"), [({"dp_shard": 2}, 6), ({"tp": 2}, 8)], ids=str)
def test_replayed_graphs_train_as_those_that_run(pool: Pool, dims: dict[str, int], replayed: int) -> None:
    """Tensor parallelism has no last sums of gradients that no_sync() would hold."""
    for found in pool.run("tests.distributed.training_jobs:replay", world_size=2, dims=dims):
        assert found == {"error": 0.0, "recorded": 2, "replayed": replayed, "said": []}


@pytest.mark.parametrize("dims", [REPLICATED, BOTH], ids=str)
def test_clipping_knows_the_layouts(pool: Pool, dims: dict[str, int]) -> None:
    for plain, stock, ours, error in pool.run("tests.distributed.training_jobs:clip", dims=dims):
        assert stock == pytest.approx(plain, rel=1e-5)
        assert ours == pytest.approx(plain, rel=1e-5)
        assert error <= 1e-5


@pytest.mark.exhaustive(sample="{'dp_shard': 2, 'tp': 2}")
@pytest.mark.parametrize("dims", [REPLICATED, BOTH], ids=str)
def test_other_shapes_and_eval_keep_a_plan_or_are_planned_anew(pool: Pool, dims: dict[str, int]) -> None:
    for differences in pool.run("tests.distributed.training_jobs:other_inputs", dims=dims):
        assert max(differences.values()) <= 1e-5, differences


@pytest.mark.exhaustive(sample="{'tp': 4}")
@pytest.mark.parametrize("dims", [{"dp_shard": 4}, {"tp": 4}], ids=str)
def test_a_criterion_outside_the_module_works(pool: Pool, dims: dict[str, int]) -> None:
    assert max(pool.run("tests.distributed.training_jobs:outside_criterion", dims=dims)) <= 1e-5


@pytest.mark.exhaustive(sample="{'tp': 4}")
@pytest.mark.parametrize("dims", [{"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"tp": 4}], ids=str)
def test_local_parts_make_the_global_batch(pool: Pool, dims: dict[str, int]) -> None:
    assert max(pool.run("tests.distributed.training_jobs:local_batch", dims=dims)) <= 1e-5


def test_batch_norm_statistics_are_global(pool: Pool) -> None:
    for differences in pool.run("tests.distributed.training_jobs:batch_norm", dims={"dp_shard": 4}):
        assert max(differences.values()) <= 1e-5, differences


@pytest.mark.exhaustive
def test_dropout_of_four_processes_equals_one(pool: Pool) -> None:
    alone = pool.run("tests.distributed.training_jobs:dropout_losses", world_size=1, dims=None)[0]
    assert len(set(alone)) == 3, "every step draws anew"
    for dims in PLANS[1:]:
        together = pool.run("tests.distributed.training_jobs:dropout_losses", dims=dims)
        assert together[3] == pytest.approx(alone, rel=1e-5)


@pytest.mark.exhaustive(sample="{'dp_shard': 2, 'tp': 2}")
@pytest.mark.parametrize("dims", [{"dp_shard": 4}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_an_optimizer_instance_keeps_its_state(pool: Pool, dims: dict[str, int]) -> None:
    assert max(pool.run("tests.distributed.training_jobs:optimizer_instance", dims=dims)) <= 1e-5


def test_a_meta_model_gets_the_same_weights_under_every_plan(pool: Pool) -> None:
    alone = pool.run("tests.distributed.training_jobs:meta_model", world_size=1, dims=None)[0]
    for dims in ({"dp_shard": 4}, {"tp": 4}):
        for loss, norms in pool.run("tests.distributed.training_jobs:meta_model", dims=dims):
            assert loss == pytest.approx(alone[0], rel=1e-5)
            assert norms == pytest.approx(alone[1], rel=1e-5)
