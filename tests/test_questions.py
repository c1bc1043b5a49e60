"""A pipeline that meets a batch of another size keeps its stages, in micro-batches that divide the batch."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.capture import Captures
from autopar.cluster import Cluster
from autopar.demo.gpt import GPT, GPTConfig
from autopar.parallel_plan import Plan
from autopar.program import Program
from autopar.questions import Options, capture_program, plan_program

MODEL = GPT(GPTConfig(vocabulary=16, positions=8, width=16, heads=2, layers=2))
GIVEN = Options(cluster=Cluster.parse("2 cpu"))


def _tokens(batch: int) -> torch.Tensor:
    return torch.zeros(batch, 8, dtype=torch.long)


def _program(batch: int) -> Program:
    return capture_program(MODEL, (_tokens(batch), _tokens(batch)), {}, True, GIVEN, Captures())


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar.plan(
        MODEL, (_tokens(8), _tokens(8)), cluster="2 cpu", dims={"pp": 2}, schedule="zb-1p", micro_batches=4
    )


def test_a_batch_that_does_not_split_takes_fewer_micro_batches(plan: Plan) -> None:
    found = plan_program(_program(6), GIVEN, plan, _program)
    assert found.micro_batches == 3
    assert found.pipeline is not None
    assert plan.pipeline is not None
    assert found.pipeline.stages == plan.pipeline.stages
    assert found.pipeline.built(3).micro_batches == 3
    assert "a batch of 6 does not split into 4 micro-batches: 3, by 1f1b" in found.notes


def test_a_batch_that_splits_keeps_the_plan(plan: Plan) -> None:
    assert plan_program(_program(4), GIVEN, plan, _program) == plan
