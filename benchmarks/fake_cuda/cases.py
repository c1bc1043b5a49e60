"""The rows: models of full size on eight H100s, and those of the zoo under FSDP and tensor parallelism on four.

    row(LARGE["llama3-8b"])      -> {"model": "llama3-8b", "mesh": ..., "step_bytes": {"planned": ..., "run": ...}, ...}

Zoo models keep their dtype; those in float64 run in bf16, as no GPU computes attention or experts in float64 fast.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autopar.capture import Captures
from autopar.hardware.cluster import Cluster
from autopar.planner.batch.micro_batch_program import planned_parts
from autopar.planner.planning import make_plan
from autopar.planner.problem.optimizer_states import state_bytes
from autopar.questions import capture_example
from autopar.request import Request
from benchmarks.fake_cuda.checks import PlannedBytes, faults, planned_bytes
from benchmarks.fake_cuda.rank_step import Record, run_rank
from benchmarks.models import WORKLOADS, Inputs, images_and_labels, vit, workload
from benchmarks.vision import ResNet
from benchmarks.zoo.registry import ZooEntry, entries, make

LARGE_WORKLOADS = ("gpt2", "gpt2-1.3b", "llama3-8b", "olmoe-64-experts", "unet", "t5")
OPTIMIZER = torch.optim.AdamW
Made: TypeAlias = tuple[nn.Module, Inputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """build: model and inputs, on meta or with values; asked: what the request says beside cluster and optimizer;
    rank: whose program runs."""

    name: str
    build: Callable[[], Made]
    cluster: str
    rank: int
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
    return Case(name=name, build=build, cluster="8 H100-SXM", rank=5, asked={"mode": "fast"})


LARGE: Mapping[str, Case] = {
    case.name: case
    for case in (
        *(_large(name, partial(workload, name)) for name in WORKLOADS if name in LARGE_WORKLOADS),
        _large("vit-large", _vit_large),
        _large("resnet-34", _resnet_34),
        replace(_large("gpt2-fp8", partial(workload, "gpt2")), asked={"mode": "fast", "precision": "fp8"}),
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
    return Case(name=entry.name, build=partial(make, own), cluster="4 H100-SXM", rank=3, asked=asked)


def row(case: Case) -> dict[str, Any]:
    """Plan the case, run the step of its rank, and compare."""
    model, inputs = case.build()
    record, planned, plan_says = recorded(case, model, inputs)
    found = faults(record, planned)
    kernels = Counter(call.name for call in record.calls if call.launches)
    return {
        "model": case.name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "cluster": case.cluster,
        "rank": case.rank,
        **plan_says,
        "nodes": len(record.turns),
        "kernels": kernels.total(),
        "attention": {name: count for name, count in sorted(kernels.items()) if "attention" in name},
        "resident_bytes": record.resident_bytes,
        "step_bytes": _beside(planned.step, record.step_bytes),
        "peak_bytes": _beside(planned.peak, record.peak_bytes),
        "faults": _shortened(found),
    }


def recorded(case: Case, model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Record, PlannedBytes, dict[str, Any]]:
    """The record of the case's rank, what was planned of its bytes, and what a row says of the plan."""
    request = Request(cluster=Cluster.parse(case.cluster), optimizer=OPTIMIZER, with_baselines=False, **case.asked)
    captured = capture_example(model, (), dict(inputs), request, Captures())
    plan = make_plan(captured.program, request, recapture=captured)
    parts = captured.program if plan.in_one_part else planned_parts(captured.program, plan, captured)
    started = time.perf_counter()
    record = run_rank(parts, plan, OPTIMIZER, case.rank)
    seconds = time.perf_counter() - started
    device = request.cluster.device
    planned = planned_bytes(record.lowered, state_bytes(record.lowered.program, OPTIMIZER, device.kind), device)
    says = {
        "mesh": dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
        "micro_batches": plan.micro_batches,
        "kernels_of_ours": list(plan.kernels),
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "run_seconds": round(seconds, 2),
    }
    return record, planned, says


def _beside(planned: float, run: int) -> dict[str, float]:
    return {"planned": round(planned), "run": run, "run_of_planned": round(run / planned, 5)}


def _shortened(found: Sequence[str], most: int = 6) -> list[str]:
    """The first few that differ in more than numbers, and how many there are."""
    kinds = list({re.sub(r"\d+", "", fault): fault for fault in reversed(found)}.values())[::-1]
    return [*kinds[:most], *([f"... {len(found)} in all"] if len(found) > len(kinds[:most]) else [])]
