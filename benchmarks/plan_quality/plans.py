"""Our plans of a setting: the one that autopar chooses, and every baseline's own plan forced on our runtime.

    plans = make_plans(setting, cluster, log)       # {"autopar": Plan, "autopar as ddp": Plan, ...}

Forcing is done by what any user has: `dims=` with the names whose presets are those plans (docs/control.md), a schedule
for pipelines, constraints for the published searches (`searches.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

import autopar
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.planner.batch.batch_flow import NotSeparable
from autopar.plans.parallel_plan import Plan
from benchmarks.netlab.pipelines.traffic import sent_bytes
from benchmarks.plan_quality.baselines.pipelining import micro_batches
from benchmarks.plan_quality.captured import Captured
from benchmarks.plan_quality.searches import SEARCHES
from benchmarks.plan_quality.settings import Inputs, Setting

CHOSEN = "autopar"
FORCED = "autopar as "
SAME_AS = "the same plan as "
"""Begins the reason why a plan did not run of its own, and its twin's name follows."""


def wishes(ranks: int, batch: int) -> dict[str, dict[str, Any]]:
    """Name -> arguments of `autopar.Planner.plan` that ask for it."""
    return {
        CHOSEN: {"with_baselines": True},
        "autopar without pipeline": {"micro_batches": 1},
        f"{FORCED}ddp": {"dims": {"dp_replicate": ranks}, "micro_batches": 1, "mode": "fast"},
        f"{FORCED}fsdp2": {"dims": {"dp_shard": ranks}, "micro_batches": 1, "mode": "fast"},
        f"{FORCED}tp": {"dims": {"tp": ranks}, "micro_batches": 1, "mode": "fast"},
        f"{FORCED}1f1b": {"dims": {"pp": ranks}, "schedule": "1f1b", "micro_batches": micro_batches(batch)},
    }


def make_plans(
    setting: Setting, cluster: Cluster, log: Callable[[str], None]
) -> tuple[dict[str, Plan], dict[str, str]]:
    """Plans by name, and the reason for each that there is not. Plans that came out equal are kept once."""
    model, inputs = setting.model_and_inputs()
    planner = autopar.Planner(model, inputs, cluster=cluster, optimizer=torch.optim.SGD)
    found: dict[str, Plan] = {}
    reasons: dict[str, str] = {}
    for name, arguments in wishes(cluster.num_devices, batch_of(inputs)).items():
        try:
            found[name] = planner.plan(**arguments)
        except AutoparError as error:
            reasons[name] = str(error)
    for name, candidates in SEARCHES.items():
        found.update(best_of(f"{FORCED}{name}", candidates(model, cluster.num_devices, batch_of(inputs)), planner))
    return different(found, reasons, log), reasons


def best_of(name: str, candidates: Iterable[Mapping[str, Any]], planner: autopar.Planner) -> dict[str, Plan]:
    """The candidate with the shortest predicted step under `name`; nothing where none can be planned."""
    plans = []
    for arguments in candidates:
        with contextlib.suppress(AutoparError):  # widths, heads or batches that these sizes do not divide
            plans.append(planner.plan(**arguments))
    return {name: min(plans, key=lambda plan: plan.predicted.step_seconds)} if plans else {}


def different(found: Mapping[str, Plan], reasons: dict[str, str], log: Callable[[str], None]) -> dict[str, Plan]:
    """The plans without those that run the same as an earlier one; these get a reason."""
    plans: dict[str, Plan] = {}
    for name, plan in found.items():
        twin = next((other for other, known in plans.items() if same_choices(plan, known)), None)
        same = "" if twin is None else f", the plan of {twin!r}"
        log(f"  {name}: {describe(plan)}, predicted {plan.predicted.step_seconds:.3f} s{same}")
        if twin is None:
            plans[name] = plan
        else:
            reasons[name] = f"{SAME_AS}{twin!r}"
    return plans


def twin_of(reason: str) -> str | None:
    """The plan that ran for one that was left out; None where it was left out for another reason."""
    return reason.removeprefix(SAME_AS).strip("'") if reason.startswith(SAME_AS) else None


def batch_of(inputs: Inputs) -> int:
    """Samples of the global batch."""
    return len(next(iter(inputs.values())))


def same_choices(one: Plan, other: Plan) -> bool:
    """Whether two plans run the same."""
    fields = (
        "mesh",
        "parameters",
        "operators",
        "inputs",
        "buffers",
        "outputs",
        "replicated_experts",
        "bucket_bytes",
        "product_chunks",
        "micro_batches",
        "pipeline",
    )
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def describe(plan: Plan) -> str:
    """Mesh and schedule in a few words."""
    mesh = " x ".join(f"{name}={size}" for name, size in zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))
    if plan.pipeline is None:
        return mesh if plan.micro_batches == 1 else f"{mesh}, {plan.micro_batches} micro-batches"
    return f"{mesh}, {plan.pipeline.schedule}, {len(plan.pipeline.stages)} stages, {plan.micro_batches} micro-batches"


def predicted(captured: Captured, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """What the simulator says of a plan's step. sent_bytes: of each rank, to other nodes; None where not counted."""
    said = plan.predicted
    return {
        "seconds": said.step_seconds,
        "exposed_communication_seconds": said.exposed_communication_seconds,
        "peak_bytes": said.peak_bytes,
        "is_pipeline": plan.pipeline is not None,
        "sent_bytes": _sent_bytes(captured, plan, cluster),
    }


def _sent_bytes(captured: Captured, plan: Plan, cluster: Cluster) -> list[float] | None:
    try:
        return sent_bytes(captured.program(plan), plan, cluster)
    except (AutoparError, NotSeparable):
        return None
