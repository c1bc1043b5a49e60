"""Bubbles measured and simulated: python -m benchmarks.bubbles [--write]

A GPT-2 of eight blocks runs under several schedules on four gloo processes with half a core each. Every pass of every
rank is timed; what a rank does not compute between its first and its last pass is its bubble. The simulator plays the
same schedule with the measured seconds of every stage's passes (median over steps) and of a transfer. Both are the part
of the longest rank's span in which the ranks, on average, do not compute.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.cost_models.schedule_player import play_pipeline
from autopar.cost_models.stage_costs import StageCosts
from autopar.hardware.cluster import Cluster
from autopar.plans.parallel_plan import Plan
from autopar.runtime.pipeline.pipeline_run import PipelineRun
from autopar.schedules.actions import PipeAction
from benchmarks.netlab.cores import cores_directory, make_group
from benchmarks.results import write_results
from benchmarks.workers import Pool

RESULTS = Path(__file__).parent / "results" / "bubbles.json"
SCHEDULES = {"1f1b": 1, "zb-h1": 1, "interleaved": 2, "zb-v": 2}
"""Family -> stages per rank."""
RANKS, BLOCKS, MICRO_BATCHES, SAMPLES = 4, 8, 8, 2
WIDTH, LENGTH, VOCABULARY = 256, 128, 512
CORES = 0.5
STEPS = 5
Pass = tuple[PipeAction, float, float]
"""An action of this rank with its start and end, in seconds of its own clock."""


def model() -> nn.Module:
    """The same weights everywhere."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        **{"n_layer": BLOCKS, "n_head": 4, "n_embd": WIDTH, "vocab_size": VOCABULARY, "n_positions": LENGTH},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        **{"bos_token_id": None, "eos_token_id": None, "use_cache": False},
    }
    return GPT2LMHeadModel(GPT2Config(**options))


def batch() -> dict[str, torch.Tensor]:
    """Tokens, and labels that are the tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (MICRO_BATCHES * SAMPLES, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


@functools.lru_cache
def planned(family: str) -> Plan:
    """The plan of a schedule: what the planner cuts, on this machine's cores."""
    return autopar.plan(
        model(),
        batch(),
        cluster=Cluster.detect(RANKS),
        dims={"pp": RANKS},
        schedule=family,
        micro_batches=MICRO_BATCHES,
        recompute="none",
    ).with_(kernel_backend="eager")


def timed_steps(plan: bytes, groups: Sequence[str]) -> tuple[list[list[Pass]], float]:
    """On a worker: the passes of every step but the first, and the seconds of one transfer between stages.

    groups: the cgroup of every rank.
    """
    Path(groups[dist.get_rank()], "cgroup.procs").write_text(str(os.getpid()))
    module = autopar.compile(model(), batch(), plan=Plan.from_json(plan))
    steps: list[list[Pass]] = []
    act = PipelineRun.act

    def timed(self: PipelineRun, action: PipeAction, received: dict[str, torch.Tensor]) -> None:
        start = time.perf_counter()
        act(self, action, received)
        steps[-1].append((action, start, time.perf_counter()))

    with mock.patch.object(PipelineRun, "act", timed):
        for _ in range(1 + STEPS):
            dist.barrier()
            steps.append([])
            module(**batch())["loss"].backward()
            module.zero_grad()
    return steps[1:], _transfer_seconds()


def _transfer_seconds(rounds: int = 20) -> float:
    """Half of a round trip of one activation between ranks 0 and 1."""
    value, rank = torch.zeros(SAMPLES, LENGTH, WIDTH), dist.get_rank()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(rounds if rank < 2 else 0):
        if rank == 0:
            dist.send(value, 1)
            dist.recv(value, 1)
        else:
            dist.recv(value, 0)
            dist.send(value, 0)
    return (time.perf_counter() - start) / rounds / 2


def bubble(ranks: Sequence[Sequence[Pass]]) -> float:
    """Part of the longest span in which the ranks of one step do not compute, on average."""
    spans = [passes[-1][2] - passes[0][1] for passes in ranks]
    computed = sum(end - start for passes in ranks for _, start, end in passes)
    return 1.0 - computed / (len(spans) * max(spans))


def stage_costs(steps: Sequence[Sequence[Sequence[Pass]]]) -> list[StageCosts]:
    """Median seconds of every stage's passes. steps: by rank."""
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for ranks in steps:
        for passes in ranks:
            for action, start, end in passes:
                seconds[action.stage, action.kind].append(end - start)
    middle = {key: statistics.median(values) for key, values in seconds.items()}
    return [
        StageCosts(
            forward_seconds=middle[stage, "F"],
            backward_seconds=middle.get((stage, "B"), 0.0) or middle[stage, "I"],
            weight_seconds=middle.get((stage, "W"), 0.0),
        )
        for stage in range(1 + max(stage for stage, _ in middle))
    ]


def compared(family: str, pool: Pool, groups: Sequence[str]) -> dict[str, Any]:
    """Measured and simulated bubble of one schedule."""
    plan = planned(family)
    assert plan.pipeline is not None
    found = pool.run("benchmarks.bubbles:timed_steps", timeout=200.0, plan=plan.to_json(), groups=groups)
    steps = [[ranks[step] for ranks, _ in found] for step in range(STEPS)]
    stages = stage_costs(steps)
    played = play_pipeline(stages, plan.pipeline.built(MICRO_BATCHES), send_seconds=found[0][1])
    measured = statistics.median(bubble(ranks) for ranks in steps)
    return {
        "schedule": family,
        "stages": len(stages),
        "measured_bubble": round(measured, 4),
        "simulated_bubble": round(played.bubble_rate, 4),
        "points_apart": round(100 * abs(measured - played.bubble_rate), 2),
        "measured_step_seconds": round(statistics.median(max(p[-1][2] - p[0][1] for p in ranks) for ranks in steps), 4),
        "simulated_step_seconds": round(max(played.span_seconds), 4),
        "transfer_seconds": round(found[0][1], 5),
        "forward_seconds": [round(stage.forward_seconds, 4) for stage in stages],
    }


def main(arguments: Sequence[str]) -> None:
    """Measure every schedule; `--write` keeps the results, names choose among the schedules."""
    directory = cores_directory()
    groups = [make_group(f"autopar-bubbles-{os.getpid()}-{rank}", CORES, directory) for rank in range(RANKS)]
    pool = Pool(RANKS)
    rows = []
    try:
        for family in [name for name in SCHEDULES if name in arguments] or SCHEDULES:
            rows.append(compared(family, pool, [str(group) for group in groups]))
            print(rows[-1], flush=True)
    finally:
        pool.close()
        for group in groups:
            group.rmdir()
    if "--write" in arguments:
        write_results(RESULTS, {"cores_per_rank": CORES, "micro_batches": MICRO_BATCHES, "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
