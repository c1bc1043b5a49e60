"""Without a mesh, the longest search also looks at pipelines, and keeps what is predicted to be faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.demo.gpt import GPT, GPTConfig
from autopar.parallel_plan import Plan
from autopar.planner.stages.free import better_by_prediction

TOKENS = torch.zeros(4, 8, dtype=torch.long)


@pytest.fixture(scope="module")
def pipeline() -> Plan:
    model = GPT(GPTConfig(vocabulary=16, positions=8, width=16, heads=2, layers=2))
    return autopar.plan(model, (TOKENS, TOKENS), cluster="2 cpu", dims={"pp": 2}, schedule="1f1b", micro_batches=2)


@pytest.mark.parametrize(("factor", "keeps_stages"), [(0.5, False), (2.0, True)])
def test_the_faster_by_prediction_is_kept(pipeline: Plan, factor: float, keeps_stages: bool) -> None:
    step = replace(pipeline.predicted, step_seconds=factor * pipeline.predicted.step_seconds)
    plain = replace(pipeline, pipeline=None, predicted=step, notes=())
    found = better_by_prediction(plain, pipeline, "")
    assert (found.pipeline is not None) == keeps_stages
    words = "without stages the best plan is predicted" if keeps_stages else "the best pipeline (pp=2) is predicted"
    assert found.notes[-1].startswith(words)


def test_a_reason_against_pipelines_is_kept(pipeline: Plan) -> None:
    assert better_by_prediction(pipeline, None, "no loss").notes[-1] == "no pipeline: no loss"


def test_the_longest_search_tries_pipelines() -> None:
    model = GPT(GPTConfig(vocabulary=16, positions=8, width=16, heads=2, layers=2))
    plan = autopar.plan(model, (TOKENS, TOKENS), cluster="2 cpu", mode="max")
    assert any("pipeline" in note or "without stages" in note for note in plan.notes)
