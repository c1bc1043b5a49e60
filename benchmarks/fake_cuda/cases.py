"""The rows: models of full size on eight H100s, and those of the zoo under FSDP and tensor parallelism on four.

    rows(LARGE["llama3-8b"])      [{"model": "llama3-8b", "mesh": ..., "step_bytes": {"planned": ..., "run": ...}, ...}]
    rows(STAGES["gpt2-1f1b"])     a row per stage: of its first rank and of its last

Zoo models keep their dtype; those in float64 run in bf16, as no GPU computes attention or experts in float64 fast.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autopar.capture import Captures
from autopar.hardware.cluster import Cluster
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.planner.batch.micro_batch_program import planned_parts
from autopar.planner.planning import make_plan
from autopar.questions import capture_example
from autopar.request import Request
from autopar.simulation.step_program import StepProgram
from benchmarks.fake_cuda.checks import PlannedBytes, faults, planned_bytes, planned_stage_bytes
from benchmarks.fake_cuda.rank_step import Record, run_rank
from benchmarks.models import WORKLOADS, Inputs, LossOnly, images_and_labels, vit, workload
from benchmarks.vision import ResNet
from benchmarks.zoo.registry import ZooEntry, entries, make

LARGE_WORKLOADS = ("gpt2", "gpt2-1.3b", "llama3-8b", "olmoe-64-experts", "unet", "t5")
OPTIMIZER = torch.optim.AdamW
Made: TypeAlias = tuple[nn.Module, Inputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """build: model and inputs, on meta or with values; asked: what the request says beside cluster and optimizer;
    ranks: whose programs run, a row each."""

    name: str
    build: Callable[[], Made]
    cluster: str
    ranks: tuple[int, ...]
    asked: Mapping[str, Any] = field(default_factory=dict)


def _vit_large() -> Made:
    with torch.device("meta"):
        model = vit(layers=24, width=1024, heads=16, size=224, patch=16, classes=1000).bfloat16().train()
        inputs = images_and_labels(1000)(1024, 224)
    return model, {name: value.bfloat16() if value.is_floating_point() else value for name, value in inputs.items()}


def _resnet_34() -> Made:
    with torch.device("meta"):
        model = ResNet(width=64, blocks=(3, 4, 6, 3), classes=1000).bfloat16().train()
        inputs = {"images": torch.randn(128, 3, 224, 224).bfloat16(), "labels": torch.randint(0, 1000, (128,))}
    return model, inputs


def _large(name: str, build: Callable[[], Made]) -> Case:
    return Case(name=name, build=build, cluster="8 H100-SXM", ranks=(5,), asked={"mode": "fast"})


LARGE: Mapping[str, Case] = {
    case.name: case
    for case in (
        *(_large(name, partial(workload, name)) for name in WORKLOADS if name in LARGE_WORKLOADS),
        _large("vit-large", _vit_large),
        _large("resnet-34", _resnet_34),
        replace(_large("gpt2-fp8", partial(workload, "gpt2")), asked={"mode": "fast", "precision": "fp8"}),
    )
}


def _staged(
    name: str, build: Callable[[], Made], schedule: str, dims: Mapping[str, int], ranks: tuple[int, ...]
) -> Case:
    asked = {"mode": "fast", "schedule": schedule, "dims": dims}
    return Case(name=f"{name}-{schedule}", build=build, cluster="8 H100-SXM", ranks=ranks, asked=asked)


def _loss_of(name: str, batch: int | None = None) -> Made:
    """A language model without its logits: a step that returns them hands those of the whole batch to every rank."""
    model, inputs = workload(name, batch=batch)
    return LossOnly(model).train(), inputs


STAGES: Mapping[str, Case] = {
    case.name: case
    for case in (
        _staged("gpt2", partial(_loss_of, "gpt2"), "1f1b", {"pp": 2, "dp_shard": 4}, (0, 7)),
        _staged("gpt2", partial(_loss_of, "gpt2"), "gpipe", {"pp": 2, "dp_shard": 4}, (0, 7)),
        _staged("gpt2", partial(_loss_of, "gpt2"), "interleaved", {"pp": 2, "dp_shard": 4}, (0, 7)),
        _staged("gpt2", partial(_loss_of, "gpt2"), "zb-h1", {"pp": 4, "dp_shard": 2}, (0, 3, 4, 7)),
        _staged("llama3-8b", partial(_loss_of, "llama3-8b"), "1f1b", {"pp": 4, "tp": 2}, (0, 3, 4, 7)),
        _staged("llama3-8b", partial(_loss_of, "llama3-8b"), "zb-v", {"pp": 2, "dp_shard": 4}, (0, 7)),
    )
}


def zoo() -> list[Case]:
    """One case per entry."""
    return [_of_entry(entry) for entry in entries()]


def _of_entry(entry: ZooEntry) -> Case:
    own = replace(entry, dtype=torch.bfloat16) if entry.dtype == torch.float64 else entry
    asked = {
        "dims": {"dp_shard": 2, "tp": 2},
        "mode": "fast",
        "loss_fn": entry.loss_fn,
        "branches": entry.branches,
        "batch_dims": entry.batch_dims,
    }
    return Case(name=entry.name, build=partial(make, own), cluster="4 H100-SXM", ranks=(3,), asked=asked)


def rows(case: Case) -> Iterator[dict[str, Any]]:
    """Plan the case, run the step of each of its ranks, and compare."""
    model, inputs = case.build()
    asked = asked_step(case, model, inputs)
    plan = asked.plan
    for rank in case.ranks:
        started = time.perf_counter()
        record = run_rank(asked.micro or asked.program, plan, OPTIMIZER, rank)
        seconds = time.perf_counter() - started
        planned = planned_of(asked, record, rank)
        kernels = Counter(call.name for call in record.calls if call.launches)
        yield {
            "model": case.name,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "cluster": case.cluster,
            "rank": rank,
            "mesh": dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
            "micro_batches": plan.micro_batches,
            **_stages(asked, rank, record),
            "kernels_of_ours": list(plan.kernels),
            "predicted_peak_bytes": plan.predicted.peak_bytes,
            "run_seconds": round(seconds, 2),
            "nodes": len(record.turns),
            "kernels": kernels.total(),
            "attention": {name: count for name, count in sorted(kernels.items()) if "attention" in name},
            "resident_bytes": record.resident_bytes,
            "step_bytes": _beside(planned.step, record.step_bytes),
            "peak_bytes": _beside(planned.peak, record.peak_bytes),
            "faults": _shortened(faults(record, planned)),
        }


def asked_step(case: Case, model: nn.Module, inputs: Mapping[str, Tensor]) -> StepProgram:
    """The plan of a case, and what prices its step."""
    request = Request(cluster=Cluster.parse(case.cluster), optimizer=OPTIMIZER, with_baselines=False, **case.asked)
    captured = capture_example(model, (), dict(inputs), request, Captures())
    plan = make_plan(captured.program, request, recapture=captured)
    whole = with_kernels(captured.program, plan.kernels)
    count = plan.micro_batches
    parts = whole if plan.in_one_part else planned_parts(whole, count, captured, kernels=plan.kernels)
    return StepProgram(plan, parts, request.cluster, OPTIMIZER)


def planned_of(asked: StepProgram, record: Record, rank: int) -> PlannedBytes:
    """What was planned of a rank's bytes."""
    if asked.plan.in_stages:
        return planned_stage_bytes(asked, rank)
    return planned_bytes(record.lowered, asked.state_bytes, asked.cluster.device)


def _stages(asked: StepProgram, rank: int, record: Record) -> dict[str, Any]:
    """Of a pipeline: its schedule, the stages of a rank, and how many messages it sends and receives."""
    plan = asked.plan
    if not plan.in_stages:
        return {}
    return {
        "schedule": plan.staged.schedule,
        "stages": asked.graphs.held_by(plan.group_of(rank)),
        "sends": sum(call.name == "send" for call in record.calls),
        "receives": sum(call.name == "recv_" for call in record.calls),
    }


def _beside(planned: float, run: int) -> dict[str, float]:
    return {"planned": round(planned), "run": run, "run_of_planned": round(run / planned, 5)}


def _shortened(found: Sequence[str], most: int = 6) -> list[str]:
    """The first few that differ in more than numbers, and how many there are."""
    kinds = list({re.sub(r"\d+", "", fault): fault for fault in reversed(found)}.values())[::-1]
    return [*kinds[:most], *([f"... {len(found)} in all"] if len(found) > len(kinds[:most]) else [])]
