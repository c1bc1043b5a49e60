"""What the collectives of a chosen pipeline's stages hide: counted by the planner as the lowered program is played."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.capture import Captures
from autopar.cost_models.schedule_player import play_pipeline
from autopar.cost_models.stage_costs import StageCosts
from autopar.demo.gpt import GPT, GPTConfig
from autopar.hardware.cluster import Cluster
from autopar.planner.batch.micro_batch_program import in_parts
from autopar.planner.pipelines import hidden_in_stages
from autopar.plans.parallel_plan import Plan
from autopar.program import MicroProgram
from autopar.questions import capture_model
from autopar.request import Request
from autopar.schedules.list_scheduler import build_schedule
from autopar.simulation.played_plan import simulate_plan

CLUSTER = "4x2 H100-SXM @ 25Gb"
COUNT = 4


@functools.lru_cache
def _model() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    tokens = torch.zeros(32, 64, dtype=torch.long)
    return GPT(GPTConfig(vocabulary=64, positions=64, width=512, heads=8, layers=4)), (tokens, tokens)


@functools.lru_cache
def _program() -> MicroProgram:
    model, batch = _model()
    captured = capture_model(model, batch, {}, Request(cluster=Cluster.parse(CLUSTER)), Captures(), training=True)
    return in_parts(captured.program, COUNT, captured)


@functools.lru_cache
def _plan(schedule: str, axis: str) -> Plan:
    model, batch = _model()
    return autopar.plan(
        model, batch, cluster=CLUSTER, dims={"pp": 2, axis: 4}, schedule=schedule, micro_batches=COUNT, mode="fast",
        with_baselines=False, recompute="none",
    )  # fmt: skip


def _played(plan: Plan) -> float:
    return simulate_plan(plan, _program(), Cluster.parse(CLUSTER), torch.optim.AdamW).step_seconds


@pytest.mark.exhaustive(sample="1f1b-dp_replicate")
@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "tp"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_what_is_hidden_is_what_the_lowered_program_hides(schedule: str, axis: str) -> None:
    plan = _plan(schedule, axis)
    alone = plan.with_(bucket_bytes=None, product_chunks={})
    overlapped, one_by_one = _played(plan), _played(alone)
    assert overlapped <= one_by_one * (1 + 1e-9), "a played step is never longer"
    assert plan.predicted.step_seconds <= plan.objective_seconds
    assert overlapped == pytest.approx(plan.predicted.step_seconds, rel=0.1)
    assert one_by_one == pytest.approx(plan.objective_seconds, rel=0.1)
    if axis != "tp":  # sums of gradients over 25 Gbit/s, in buckets and beside the last backward
        assert plan.predicted.step_seconds < 0.97 * plan.objective_seconds


def test_what_does_not_fit_runs_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _plan("1f1b", "dp_shard").bucket_bytes is not None
    _plan.cache_clear()
    more = hidden_in_stages._More(forward=1e12, backward=1e12)
    monkeypatch.setattr(hidden_in_stages, "_more_bytes", lambda *_: more)
    refused = _plan("1f1b", "dp_shard")
    assert refused.bucket_bytes is None
    assert refused.predicted.step_seconds == refused.objective_seconds
    _plan.cache_clear()


def test_a_last_pass_that_takes_longer_delays_what_waits_for_it() -> None:
    stages = [StageCosts(forward_seconds=1.0, backward_seconds=2.0)] * 4
    schedule = build_schedule("1f1b", 4, 8)
    assert play_pipeline(stages, schedule).step_seconds == 33.0
    for longer in (0, 3):  # rank 0 ends last, and behind the last pass of the others
        changed = [replace(one, last_seconds=0.5) if place == longer else one for place, one in enumerate(stages)]
        assert play_pipeline(changed, schedule).step_seconds == 33.5
