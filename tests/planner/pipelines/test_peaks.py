"""Played peaks of rank groups against what their graphs hold in the order of the schedule."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from autopar.capture import capture
from autopar.demo.gpt import GPT, GPTConfig
from autopar.hardware.cluster import Cluster
from autopar.passes.stages.stage_plans import with_pipeline
from autopar.planner.pipelines.choose_pipeline import try_families
from autopar.planner.planning import make_plan
from autopar.plans.parallel_plan import Plan
from autopar.request import Request
from autopar.verification import one_device_plan
from tests.planner.pipelines.rank_memory import held_peaks
from tests.planner.pipelines.test_block_costs import Made, solved_program

RANKS, MICRO_BATCHES = 4, 8
WITHIN = 0.1
"""Above; what W reads is counted to the end of a whole backward."""


@functools.lru_cache
def _eight() -> tuple[Made, Plan]:
    """A GPT of eight blocks, and the plan of one device."""
    model = GPT(GPTConfig(vocabulary=512, positions=32, width=32, heads=4, layers=8))
    tokens = torch.zeros(4, 32, dtype=torch.long)
    made = solved_program(capture(model, (tokens, tokens)), Cluster.parse("1 cpu"), MICRO_BATCHES)
    request = Request(cluster=Cluster.parse("1x2 H100-SXM"), dims={"tp": 2}, with_baselines=False, mode="fast")
    split = make_plan(made.program, request)
    return made, one_device_plan(split)


@pytest.mark.exhaustive(sample=["1f1b", "v-min", "zb-h1"])
@pytest.mark.parametrize("family", ["gpipe", "1f1b", "zb-h1", "v-min", "hanayo", "chimera"])
def test_played_peaks_are_what_the_ranks_hold(family: str) -> None:
    made, plan = _eight()
    pipeline = try_families(made.table, RANKS, MICRO_BATCHES, [family])[0].pipeline
    assert pipeline is not None
    stages, schedule = pipeline.cut.stages, pipeline.costs.schedule
    cuts = [made.runs.last_operators[stage.end - 1] for stage in stages[:-1]]
    whole = with_pipeline(plan, cuts, family, MICRO_BATCHES, chunks=pipeline.chunks)
    held = np.array(held_peaks(made.program, whole))
    outside = np.zeros(RANKS)  # parameters and AdamW's two states, which the graphs do not hold
    for stage, holders in zip(stages, schedule.holders, strict=True):
        outside[list(holders)] += 0.75 * made.table.state_bytes[stage.first : stage.end].sum()
    played = np.array(pipeline.costs.peak_bytes) - outside
    assert np.abs(played / held - 1.0).max() <= WITHIN
