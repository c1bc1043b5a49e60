"""Exported torch code trains as the plain model does, on four ranks, and as the plan's own runtime does."""

from __future__ import annotations

import pytest

import autopar
from autopar.exporters.uniform import nearest_uniform
from autopar.exporters.written_configurations import configuration
from tests.distributed.export_jobs import batch, small_llama
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOB = "tests.distributed.export_jobs:run_exported"


def exported(tool: str, dims: dict[str, int]) -> str:
    plan = autopar.plan(small_llama(), batch(), cluster="4 cpu", dims=dims, mode="fast", with_baselines=False)
    return configuration(plan, nearest_uniform(plan), tool).text


@pytest.mark.exhaustive(sample="fsdp2-{'dp_shard': 4}-4")
@pytest.mark.parametrize(
    ("tool", "dims", "parts"),
    [
        ("fsdp2", {"dp_shard": 4}, 4),
        pytest.param("fsdp2", {"dp_replicate": 2, "dp_shard": 2}, 4, marks=pytest.mark.slow),
        ("fsdp2", {"dp_shard": 2, "tp": 2}, 2),
        ("parallelize_plan", {"tp": 4}, 1),
    ],
    ids=str,
)
def test_exported_code_has_the_loss_and_the_gradients_of_the_plain_model(
    pool: Pool, tool: str, dims: dict[str, int], parts: int
) -> None:
    code = exported(tool, dims)
    assert ("ColwiseParallel" in code) == ("tp" in dims), code
    for loss, gradient in pool.run(JOB, code=code, parts=parts):
        assert loss <= 1e-5
        assert gradient <= 1e-4


@pytest.mark.exhaustive
def test_a_forgotten_part_of_the_batch_shows(pool: Pool) -> None:
    for _, gradient in pool.run(JOB, code=exported("fsdp2", {"dp_shard": 4}), parts=4, forget=True):
        assert gradient > 1e-2
