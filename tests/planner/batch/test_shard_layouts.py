"""A plan in logical shards splits the batch and nothing else; what cannot is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import Captures, normalize_example_inputs
from autopar.errors import ConfigurationError, PlanMismatchError
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Partial, Replicate
from autopar.planner.batch.shard_layouts import ShardLayouts
from autopar.plans.parallel_plan import Plan
from autopar.questions import CapturedModel, capture_model
from autopar.request import Request

SHARDS, BATCH = 8, 16


class Regression(nn.Sequential):
    """forward(x (B, 6), y (B, 6)) -> mean squared error."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(super().forward(x), y)


def _inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(BATCH, 6), "y": torch.randn(BATCH, 6)}


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    model = Regression(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
    args, kwargs = normalize_example_inputs(_inputs())
    return capture_model(model, args, kwargs, Request(cluster=Cluster.parse("4 cpu")), Captures())


@pytest.fixture(scope="module")
def plan(captured: CapturedModel) -> Plan:
    return autopar.plan(captured.model, _inputs(), cluster="4 cpu", deterministic=SHARDS, mode="fast")


def test_a_plan_splits_the_batch_alone_and_survives_its_file(captured: CapturedModel, plan: Plan) -> None:
    layouts = ShardLayouts.of(captured.program, SHARDS, captured)
    layouts.check(Plan.from_json(plan.to_json()))
    assert (plan.deterministic, plan.micro_batches, plan.mesh.shape) == (SHARDS, 2, (4,))
    sums = [name for name, asked in layouts.operators.items() if Partial("sum") in asked.outputs]
    assert any("0" in name and name.endswith("/bwd") for name in sums)
    for name in sums:  # the mutation: what is added up early, or not at all
        early = replace(plan.operators[name], outputs=tuple((Replicate(),) for _ in plan.operators[name].outputs))
        with pytest.raises(PlanMismatchError, match=f"deterministic=8: {name} has a tensor that lies R"):
            layouts.check(replace(plan, operators={**plan.operators, name: early}))


def test_a_file_whose_numbers_do_not_fit_is_damaged(plan: Plan) -> None:
    with pytest.raises(ConfigurationError, match="deterministic is 16: 4 devices compute 2 micro-batches"):
        Plan.from_json(replace(plan, deterministic=16).to_json())


def test_statistics_of_the_batch_are_refused_by_name() -> None:
    model = Regression(nn.Linear(6, 6), nn.BatchNorm1d(6))
    with pytest.raises(ConfigurationError, match=r"deterministic=8: a batch of 16 cannot be computed in 8 logical"):
        autopar.plan(model, _inputs(), cluster="2 cpu", deterministic=SHARDS, mode="fast")
