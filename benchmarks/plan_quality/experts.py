"""Plans that engineers published for a model on H100, to be held against ours on paper.

    EXPERTS["llama3-70b"]      # 4-way tensor, 8-way pipeline parallelism, five chunks of layers per rank

A published plan is of one number of devices: here more devices are more copies, and the batch of a copy goes through
as micro-batches of as many samples as published. Two differ: context parallelism of two (Llama 3.1 405B) is left out,
so that the copies are twice as many; and GPT's four samples are two micro-batches of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import AutoparError
from autopar.layouts.placement import Mesh
from autopar.planner.batch.batch_flow import NotSeparable
from autopar.planner.pipelines.solved_submeshes import SubMeshes
from benchmarks.published_plans import equal_stages
from benchmarks.published_settings import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """chunks: stages per rank; samples: of one micro-batch of one copy; source: where it is published."""

    tp: int
    pp: int
    chunks: int
    samples: int
    source: str


EXPERTS: Mapping[str, Expert] = {
    "gpt2-1.3b": Expert(
        tp=1, pp=1, chunks=1, samples=2, source="Megatron-LM README, weak scaling on H100: GPT of 1.7B on 48 GPUs"
    ),
    "llama3-8b": Expert(tp=1, pp=1, chunks=1, samples=1, source="Megatron-LM examples/llama: 8 H100"),
    "llama3-70b": Expert(tp=4, pp=8, chunks=5, samples=1, source="Megatron-LM examples/llama: 64 H100"),
    "llama3.1-405b": Expert(tp=8, pp=8, chunks=8, samples=1, source="Megatron-LM examples/llama: 1024 H100"),
}
"""By workload of `benchmarks.models`."""


def expert_seconds(expert: Expert, setting: Setting, shapes: SubMeshes) -> tuple[float, str]:
    """The simulated step, infinity where it does not fit, and the plan in words."""
    copies = setting.gpus // (expert.tp * expert.pp)
    count = setting.batch // (copies * expert.samples)
    words = f"dp={copies} tp={expert.tp} pp={expert.pp} x {expert.chunks}, {count} micro-batches"
    try:
        sub = shapes.on_mesh(count, Mesh(("dp_replicate", "tp"), (copies, expert.tp)))
    except (AutoparError, NotSeparable) as error:
        return math.inf, f"{words}: {error}"
    if sub is None:
        return math.inf, f"{words}: no layouts"
    return min(equal_stages(setting, table, expert.pp, expert.chunks, count) for table in sub.tables), words
