"""Pipelines on fake CUDA tensors hold what was planned of each rank, and send what the schedule says."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from autopar.demo.gpt import GPT, GPTConfig
from autopar.runtime.pipeline.pipeline_run import PipelineRun
from autopar.runtime.pipeline.stage_passes import StageGraphs
from autopar.simulation.step_program import StepProgram
from benchmarks.fake_cuda.cases import Case, asked_step, planned_of
from benchmarks.fake_cuda.checks import faults
from benchmarks.fake_cuda.rank_step import Record, run_rank

LENGTH, VOCABULARY = 256, 512
RANKS = (0, 3)
"""The first of the first stage, the last of the last."""


def _gpt() -> Any:
    inputs = {name: torch.randint(0, VOCABULARY, (16, LENGTH)) for name in ("tokens", "labels")}
    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary=VOCABULARY, positions=LENGTH, width=128, heads=4, layers=6))
        return model.bfloat16().train(), {name: tensor.to("meta") for name, tensor in inputs.items()}


@cache
def _asked(schedule: str) -> StepProgram:
    asked = {"mode": "fast", "dims": {"pp": 2, "dp_shard": 2}, "schedule": schedule, "micro_batches": 4}
    return asked_step(Case(name="gpt", build=_gpt, cluster="4 H100-SXM", ranks=RANKS, asked=asked), *_gpt())


@cache
def _planned_record(schedule: str, rank: int) -> Record:
    return _record(schedule, rank)


def _record(schedule: str, rank: int) -> Record:
    asked = _asked(schedule)
    return run_rank(asked.micro or asked.program, asked.plan, AdamW, rank)


def _faults(schedule: str, rank: int, record: Record | None = None) -> list[str]:
    record = record or _record(schedule, rank)
    return faults(record, planned_of(_asked(schedule), record, rank))


@pytest.mark.exhaustive(sample=["1f1b", "3-zb"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_of_a_pipeline_holds_and_runs_what_was_planned(schedule: str, rank: int) -> None:
    assert _faults(schedule, rank, _planned_record(schedule, rank)) == []


def test_every_value_that_crosses_is_sent_once() -> None:
    """In forward and in backward of 4 micro-batches."""
    names = [[call.name for call in _planned_record("1f1b", rank).calls] for rank in RANKS]
    assert [(each.count("send"), each.count("recv_")) for each in names] == [(4, 4), (4, 4)]


def test_a_stage_that_keeps_its_activations_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    run_forward = StageGraphs.run_forward

    def keeping(self: StageGraphs, *arguments: Any) -> Any:
        found = run_forward(self, *arguments)
        held.append(list(found[2]))
        return found

    monkeypatch.setattr(StageGraphs, "run_forward", keeping)
    assert any("forward and backward hold" in fault for fault in _faults("1f1b", 0))


def test_a_second_half_that_drops_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    act = PipelineRun.act

    def keeping(self: PipelineRun, action: Any, received: Any) -> None:
        if action.kind == "W":
            held.append(list(self.saved[action[::2]]))
        act(self, action, received)

    monkeypatch.setattr(PipelineRun, "act", keeping)
    assert any("forward and backward hold" in fault for fault in _faults("zb-h1", 0))
