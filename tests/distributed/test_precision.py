"""bf16 and float8 on four processes: close to one process under the same casts, and to fp32; parameters stay fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.precision_jobs"
PLANS = [{"dp_replicate": 4}, {"dp_shard": 4}, {"tp": 4}]


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Any]:
    result: dict[str, Any] = pool.run(f"{JOBS}:train_gpt", world_size=1, dims=None)[0]
    return result


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """|dg| / |g| over all gradients together; the same ones must exist."""
    assert found.keys() == expected.keys()
    difference = torch.cat([(found[name] - gradient).flatten() for name, gradient in expected.items()])
    return float(difference.norm() / torch.cat([g.flatten() for g in expected.values()]).norm())


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest |dg| / |g| of a parameter whose gradient is not all rounding (as those of key biases are)."""
    largest = max(float(gradient.norm()) for gradient in expected.values())
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    return max(float((found[n] - expected[n]).norm()) / norm for n, norm in norms.items() if norm > 1e-3 * largest)


@pytest.mark.exhaustive(sample="{'tp': 4}")
@pytest.mark.parametrize("dims", PLANS, ids=str)
def test_training_equals_one_process_and_follows_fp32(pool: Pool, alone: dict[str, Any], dims: dict[str, int]) -> None:
    for result in pool.run(f"{JOBS}:train_gpt", dims=dims):
        assert result["losses"] == pytest.approx(alone["losses"], rel=2e-3)
        assert result["losses"] == pytest.approx(result["plain_losses"], rel=1e-2)
        assert distance(result["gradients"], alone["gradients"]) <= 1e-2
        assert worst(result["gradients"], alone["gradients"]) <= 3e-2
        assert distance(result["gradients"], result["plain_gradients"]) <= 5e-2
        assert result["dtypes"] == {torch.float32}
        assert result["question"] == "bf16"


@pytest.mark.exhaustive(sample="{'dp_shard': 4}")
@pytest.mark.parametrize("dims", PLANS, ids=str)
def test_verify_runs_the_plain_model_under_the_same_casts(pool: Pool, dims: dict[str, int]) -> None:
    assert max(pool.run(f"{JOBS}:verified", dims=dims)) <= 0.1


def test_verify_notices_a_missing_reduction(pool: Pool) -> None:
    assert all("gradient" in text for text in pool.run(f"{JOBS}:spoiled_reduction", dims={"dp_replicate": 4}))


def test_gradients_held_by_no_sync_are_summed(pool: Pool) -> None:
    expected = pool.run(f"{JOBS}:accumulated", world_size=1, dims=None)[0]
    for found in pool.run(f"{JOBS}:accumulated", dims={"dp_shard": 4}):
        assert all(gradient.dtype == torch.float32 for gradient in found.values())
        assert distance(found, expected) <= 1e-2


def test_a_given_plan_brings_its_precision(pool: Pool) -> None:
    for found in pool.run(f"{JOBS}:precision_of_a_given_plan"):
        assert found == ["bf16", "bf16"]


@pytest.mark.exhaustive(sample="{'tp': 4}")
@pytest.mark.parametrize("dims", PLANS, ids=str)
def test_products_in_float8_follow_one_process(pool: Pool, dims: dict[str, int]) -> None:
    alone = pool.run(f"{JOBS}:train_gpt", world_size=1, dims=None, products="fp8_rowwise")[0]
    for result in pool.run(f"{JOBS}:train_gpt", dims=dims, products="fp8_rowwise"):
        assert result["implementations"] == {"fp8_rowwise"}
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-2)
        assert result["losses"] == pytest.approx(result["plain_losses"], rel=2e-2)
        assert distance(result["gradients"], alone["gradients"]) <= 0.08
        assert 1e-2 < distance(result["gradients"], result["plain_gradients"]) <= 0.15, "rounded to float8"


def test_verify_judges_float8_by_the_same_rounding(pool: Pool) -> None:
    assert max(pool.run(f"{JOBS}:verified_in_float8", dims={"tp": 4})) <= 0.125
    spoiled = pool.run(f"{JOBS}:verified_in_float8", dims={"dp_replicate": 4}, spoiled=True)
    assert all("gradient" in text for text in spoiled)
