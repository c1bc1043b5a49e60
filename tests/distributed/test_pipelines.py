"""Stages on rank groups give the loss and the gradients of the plain model, whatever the schedule and the stages."""

from __future__ import annotations

import contextlib

import pytest

import autopar
from tests.distributed.pipeline_models import CASES
from tests.distributed.pipeline_plans import gathering_once, pipeline_plan, recomputing, unequal_plan
from tests.distributed.pool import Pool, WorkerError, forked
from tests.planner.pipelines.test_mixed_devices import cluster_of_speeds

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.pipeline_jobs"
MICRO_BATCHES = 4
ALONE = {"tp": 1}


def _plan(name: str, schedule: str, dims: dict[str, int], *, quarters: bool, chunks: int = 1) -> bytes:
    blocks = CASES[name].quarters if quarters else CASES[name].halves
    return pipeline_plan(name, blocks, schedule, MICRO_BATCHES, dims, chunks).to_json()


def _check(results: list[list[dict[str, float]]], limit: float = 1e-5) -> None:
    for per_plan in results:
        for errors in per_plan:
            plain = {
                key: value for key, value in errors.items() if "weights" not in key and not key.startswith("clipped")
            }
            assert max(plain.values()) <= limit, errors
            assert max(errors.values()) <= 1e-3, errors  # AdamW divides tiny gradients by themselves


@pytest.mark.exhaustive
def test_a_tied_model_trains_on_four_stages(pool: Pool) -> None:
    plans = [_plan("gpt2", "zb-h1", ALONE, quarters=True)]
    _check(pool.run(f"{JOBS}:train", name="gpt2", plans=plans, steps=3))


@pytest.mark.exhaustive(sample="zb-h2")
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h2"])
def test_every_schedule_gives_the_same_gradients(pool: Pool, schedule: str) -> None:
    _check(pool.run(f"{JOBS}:train", name="gpt2", plans=[_plan("gpt2", schedule, ALONE, quarters=True)]))


@pytest.mark.slow
def test_several_stages_on_a_rank(pool: Pool) -> None:
    plans = [_plan("gpt2", schedule, ALONE, quarters=True, chunks=2) for schedule in ("interleaved", "zb-v")]
    _check(pool.run(f"{JOBS}:train", world_size=2, name="gpt2", plans=plans))


@pytest.mark.exhaustive(sample="skips")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "t5", "skips", "olmoe"])
def test_other_models_on_four_stages(pool: Pool, name: str) -> None:
    _check(pool.run(f"{JOBS}:train", name=name, plans=[_plan(name, "zb-h1", ALONE, quarters=True)]))


@pytest.mark.exhaustive(sample="skips")
@pytest.mark.parametrize(
    ("name", "dims", "schedule"),
    [
        ("gpt2", {"tp": 2}, "zb-h1"),
        pytest.param("gpt2", {"dp_shard": 2}, "1f1b", marks=pytest.mark.slow),
        pytest.param("gpt2", {"dp_replicate": 2}, "1f1b", marks=pytest.mark.slow),
        pytest.param("llama", {"tp": 2}, "1f1b", marks=pytest.mark.slow),
        pytest.param("t5", {"tp": 2}, "1f1b", marks=pytest.mark.slow),
        pytest.param("skips", {"dp_shard": 2}, "zb-h1", marks=pytest.mark.slow),
        pytest.param("skips", {"tp": 2}, "zb-h1", marks=pytest.mark.slow),
        pytest.param("olmoe", {"tp": 2}, "1f1b", marks=pytest.mark.slow),
        pytest.param("olmoe", {"dp_shard": 2}, "zb-h1", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stages_of_several_ranks(pool: Pool, name: str, dims: dict[str, int], schedule: str) -> None:
    plans = [_plan(name, schedule, dims, quarters=False)]
    _check(pool.run(f"{JOBS}:train", name=name, plans=plans, steps=2))


@pytest.mark.exhaustive(sample="skips-{'dp_shard': 2}-True-zb-h1")
@pytest.mark.parametrize(
    ("name", "dims", "once", "schedule"),
    [
        ("gpt2", {"dp_shard": 2}, True, "1f1b"),
        pytest.param("skips", {"dp_shard": 2}, True, "zb-h1", marks=pytest.mark.slow),
        pytest.param("llama", {"dp_shard": 2}, False, "zb-h1", marks=pytest.mark.slow),
        pytest.param("gpt2", {"tp": 2}, False, "zb-h1", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stages_that_recompute_or_gather_once(
    pool: Pool, name: str, dims: dict[str, int], once: bool, schedule: str
) -> None:
    plan = pipeline_plan(name, CASES[name].halves, schedule, MICRO_BATCHES, dims)
    plan = gathering_once(plan) if once else recomputing(plan, without="embed")
    _check(pool.run(f"{JOBS}:train", name=name, plans=[plan.to_json()]))


@pytest.mark.exhaustive(sample="skips-(1, 3)-dp_shard-1f1b")
@pytest.mark.parametrize(
    ("name", "sizes", "axis", "schedule"),
    [
        ("gpt2", (1, 2), "dp_shard", "zb-h1"),
        pytest.param("gpt2", (3, 1), "tp", "1f1b", marks=pytest.mark.slow),
        pytest.param("skips", (1, 3), "dp_shard", "1f1b", marks=pytest.mark.slow),
        pytest.param("t5", (2, 1), "tp", "zb-h1", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stages_on_unequal_rank_groups(pool: Pool, name: str, sizes: tuple[int, ...], axis: str, schedule: str) -> None:
    plan = unequal_plan(name, CASES[name].halves, schedule, MICRO_BATCHES, sizes, axis)
    _check(pool.run(f"{JOBS}:train", world_size=sum(sizes), name=name, plans=[plan.to_json()], steps=2))


@pytest.mark.exhaustive
def test_stages_on_devices_of_several_kinds(pool: Pool) -> None:
    """As planned for a device and two faster ones; on which kind they run makes no difference to the numbers."""
    case = CASES["gpt2"]
    cluster = cluster_of_speeds((1, 1.0), (2, 1.5))
    plan = autopar.plan(
        case.model(), case.batch(0), cluster=cluster, dims={"pp": [1, 2]}, micro_batches=MICRO_BATCHES, mode="fast",
        with_baselines=False,
    )
    assert sorted((group.first_rank, group.size) for group in plan.rank_groups) == [(0, 1), (1, 2)]
    _check(pool.run(f"{JOBS}:train", world_size=3, name="gpt2", plans=[plan.to_json()], steps=2))


@pytest.mark.slow
def test_gradients_of_the_step_before_are_whole_and_at_its_weights(pool: Pool) -> None:
    plan = _plan("gpt2", "2bw", ALONE, quarters=False)
    assert max(pool.run(f"{JOBS}:delayed_steps", world_size=2, name="gpt2", plan=plan)) <= 1e-5
    assert max(pool.run(f"{JOBS}:delayed_steps", world_size=2, name="gpt2", plan=plan, late=False)) > 1e-3


@pytest.mark.parametrize("fault", ["swapped micro-batch", "missing weight gradient"])
def test_a_faulty_step_is_noticed(pool: Pool, fault: str) -> None:
    plan = _plan("gpt2", "zb-h1", ALONE, quarters=False)
    for errors in pool.run(f"{JOBS}:train_with_fault", world_size=2, name="gpt2", plan=plan, fault=fault):
        assert errors["gradients"] > 1e-2, errors


@pytest.mark.exhaustive(sample="dp_replicate")
@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "tp"])
def test_stages_with_collectives_beside_computation_train_alike_however_ranks_are_delayed(
    pool: Pool, axis: str
) -> None:
    """Buckets and chunks, sums that the last pass starts; halves of backward end with W, a whole one with B."""
    plans = []
    for schedule, chunks in (("1f1b", 1), ("zb-h1", 1), ("gpipe", 1), ("interleaved", 2)):
        blocks = CASES["skips"].halves if chunks == 1 else CASES["skips"].quarters
        plan = pipeline_plan("skips", blocks, schedule, MICRO_BATCHES, {axis: 2}, chunks)
        kinds = ("all_reduce", "all_gather", "reduce_scatter")
        issued = plan.with_(bucket_bytes=dict.fromkeys(kinds, 4096.0), product_chunks=dict.fromkeys(kinds, 2))
        plans.append((gathering_once(issued) if axis == "dp_shard" else issued).to_json())
    _check(pool.run(f"{JOBS}:train_delayed", name="skips", plans=plans))


def test_half_of_a_sum_that_the_last_pass_starts_is_noticed(pool: Pool) -> None:
    plan = _plan("skips", "1f1b", {"dp_replicate": 2}, quarters=False)
    for errors in pool.run(f"{JOBS}:train_half_summed", name="skips", plan=plan):
        assert errors["gradients"] > 1e-2, errors


@pytest.mark.slow
def test_a_checkpoint_holds_all_stages(pool: Pool, tmp_path: object) -> None:
    plan = _plan("gpt2", "1f1b", ALONE, quarters=False)
    for error in pool.run(f"{JOBS}:saved_and_loaded", world_size=2, name="gpt2", plan=plan, folder=str(tmp_path)):
        assert error == 0.0


@pytest.mark.exhaustive
def test_a_batch_that_does_not_split_is_refused(pool: Pool) -> None:
    plan = _plan("gpt2", "1f1b", ALONE, quarters=False)
    for message in pool.run(f"{JOBS}:refused", world_size=2, name="gpt2", plan=plan):
        assert "micro-batches" in message


def test_verify_gathers_all_stages(pool: Pool) -> None:
    plan = _plan("gpt2", "zb-h1", ALONE, quarters=False)
    for compared, message in pool.run(f"{JOBS}:verified", world_size=2, name="gpt2", plan=plan):
        assert compared == len(list(CASES["gpt2"].model().parameters()))
        assert "gradient" in message


@pytest.mark.exhaustive
def test_ranks_pass_their_own_part_of_the_batch(pool: Pool) -> None:
    plan = _plan("gpt2", "1f1b", {"dp_shard": 2}, quarters=False)
    assert max(pool.run(f"{JOBS}:train_on_own_parts", name="gpt2", plan=plan)) <= 1e-5
    assert max(pool.run(f"{JOBS}:train_on_own_parts", name="gpt2", plan=plan, forget=True)) > 1e-2


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_an_overflow_on_one_stage_skips_the_step_on_all(pool: Pool, told: bool) -> None:
    plan = _plan("gpt2", "1f1b", ALONE, quarters=False)
    for first, second in pool.run(f"{JOBS}:scaled_steps", world_size=2, name="gpt2", plan=plan, told=told):
        assert first[:2] == (2.0**19, False)
        assert second[:2] == (2.0**19, True)
        assert second[2] <= 1e-5
    apart = pool.run(f"{JOBS}:scaled_steps", world_size=2, name="gpt2", plan=plan, apart=True, told=told)
    assert [steps[0][1] for steps in apart] == [True, False]


def test_a_rank_that_ends_in_a_step_is_named_by_those_that_wait() -> None:
    plan, own = _plan("gpt2", "1f1b", ALONE, quarters=False), forked(2)
    with contextlib.closing(own), pytest.raises(WorkerError) as caught:
        own.run(f"{JOBS}:end_in_a_step", world_size=2, name="gpt2", plan=plan)
    assert "rank 1:\nthe worker process died" in str(caught.value)
    assert "RankLostError: rank 1 ended or does not answer" in str(caught.value)
