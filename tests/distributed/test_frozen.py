"""Adapters beside frozen weights: nothing is planned, computed or kept for the gradients of what is frozen."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.plans.parallel_plan import Plan
from tests.distributed.frozen_jobs import AdaptedModel, Trained, adapted_batch
from tests.distributed.pool import Pool

ADAM_BYTES_PER_ELEMENT = 8.0


def plan_of(model: AdaptedModel) -> Plan:
    return autopar.plan(
        model, adapted_batch(), cluster="4 H100-SXM", dims={"dp_replicate": 4}, optimizer=torch.optim.AdamW,
        with_baselines=False,
    )


def test_a_plan_has_no_gradient_and_no_optimizer_bytes_for_frozen_weights() -> None:
    model = AdaptedModel()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    adapters = plan_of(model).predicted
    everything = plan_of(model.requires_grad_(True)).predicted
    state = "optimizer state"
    assert adapters.bytes_by_kind["parameters"] == everything.bytes_by_kind["parameters"] == 4 * (trained + frozen)
    assert adapters.bytes_by_kind[state] == pytest.approx(ADAM_BYTES_PER_ELEMENT * trained, rel=0.01)
    assert everything.bytes_by_kind[state] == pytest.approx(ADAM_BYTES_PER_ELEMENT * (trained + frozen), rel=0.01)
    saved = everything.peak_bytes - adapters.peak_bytes
    assert saved >= (ADAM_BYTES_PER_ELEMENT + 4) * frozen * 0.9, "the gradients are missing too"


@pytest.mark.exhaustive(sample="{'tp': 4}")
@pytest.mark.distributed
@pytest.mark.parametrize("dims", [{"dp_replicate": 4}, {"dp_shard": 4}, {"tp": 4}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_adapters_train_beside_frozen_weights(pool: Pool, dims: dict[str, int]) -> None:
    results: list[Trained] = pool.run("tests.distributed.frozen_jobs:train_adapters", dims=dims)
    for result in results:
        assert result.gradient_error <= 1e-5
        assert result.loss_error <= 1e-5
        assert result.frozen_without_gradient
        assert result.frozen_unchanged
