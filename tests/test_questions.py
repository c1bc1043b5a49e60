"""A pipeline that meets a batch of another size keeps its stages, in micro-batches that divide the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.capture import Captures
from autopar.demo.gpt import GPT, GPTConfig
from autopar.hardware.cluster import Cluster
from autopar.plans.parallel_plan import Plan
from autopar.questions import CapturedModel, _cache_path, capture_model, plan_again
from autopar.request import Request

MODEL = GPT(GPTConfig(vocabulary=16, positions=8, width=16, heads=2, layers=2))
GIVEN = Request(cluster=Cluster.parse("2 cpu"))


def _tokens(batch: int) -> torch.Tensor:
    return torch.zeros(batch, 8, dtype=torch.long)


def _captured(batch: int) -> CapturedModel:
    return capture_model(MODEL, (_tokens(batch), _tokens(batch)), {}, GIVEN, Captures(), training=True)


def _again(batch: int, plan: Plan) -> Plan:
    captured = _captured(batch)
    return plan_again(captured.program, GIVEN, plan, captured)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar.plan(
        MODEL, (_tokens(8), _tokens(8)), cluster="2 cpu", dims={"pp": 2}, schedule="zb-1p", micro_batches=4,
        with_baselines=False,
    )


def test_a_batch_that_does_not_split_takes_fewer_micro_batches(plan: Plan) -> None:
    found = _again(6, plan)
    assert found.micro_batches == 3
    assert found.pipeline is not None
    assert plan.pipeline is not None
    assert found.pipeline.stages == plan.pipeline.stages
    assert found.pipeline.built(3).micro_batches == 3
    assert "a batch of 6 does not split into 4 micro-batches: 3, by 1f1b" in found.notes


def test_a_batch_that_splits_keeps_the_plan(plan: Plan) -> None:
    assert _again(4, plan) == plan


def test_the_order_in_which_dims_are_said_asks_nothing_else() -> None:
    program = _captured(8).program
    ways = [{"tp": 2, "dp_shard": 1}, {"dp_shard": 1, "tp": 2}, {"tp": 1, "dp_shard": 2}]
    first, again, other = (_cache_path(program, replace(GIVEN, dims=dims, cache_dir="plans")) for dims in ways)
    assert first == again
    assert first != other
