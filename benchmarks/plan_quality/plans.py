"""Our plans of a setting: the one that autopar chooses, and every baseline's own plan forced on our runtime.

    plans = make_plans(setting, cluster, log)       # {"autopar": Plan, "autopar as ddp": Plan, ...}

Forcing is done by what any user has: `dims=` with the names whose presets are those plans (docs/control.md), and a
schedule for pipelines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

import autopar
from autopar.capture import Captures
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.parallel_plan import Plan
from autopar.planner.batch_flow import NotSeparable
from autopar.planner.micro_batches import in_parts
from autopar.program import Program
from autopar.questions import Options, capture_at, capture_program
from benchmarks.netlab.pipelines.traffic import sent_bytes
from benchmarks.plan_quality.baselines.pipelining import micro_batches
from benchmarks.plan_quality.settings import Inputs, Setting

CHOSEN = "autopar"
FORCED = "autopar as "


def wishes(ranks: int, batch: int) -> dict[str, dict[str, Any]]:
    """Name -> arguments of `autopar.plan` that ask for it."""
    return {
        CHOSEN: {},
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
    batch = len(next(iter(inputs.values())))
    plans: dict[str, Plan] = {}
    reasons: dict[str, str] = {}
    planner = autopar.Planner(model, inputs, cluster=cluster, optimizer=torch.optim.SGD)
    for name, arguments in wishes(cluster.num_devices, batch).items():
        try:
            if "schedule" in arguments:
                plan = autopar.plan(model, inputs, cluster=cluster, optimizer=torch.optim.SGD, **arguments)
            else:
                plan = planner.plan(**arguments)
        except AutoparError as error:
            reasons[name] = str(error)
            continue
        log(f"  {name}: {describe(plan)}, predicted {plan.predicted.step_seconds:.3f} s")
        twin = next((other for other, known in plans.items() if same_choices(plan, known)), None)
        if twin is None:
            plans[name] = plan
        else:
            reasons[name] = f"the same plan as {twin!r}"
    return plans, reasons


def same_choices(one: Plan, other: Plan) -> bool:
    """Whether two plans run the same."""
    fields = (
        "mesh",
        "parameters",
        "operators",
        "inputs",
        "buffers",
        "outputs",
        "bucket_bytes",
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


def predicted(setting: Setting, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """What the simulator says of a plan's step. sent_bytes: of each rank, to other nodes; None where not counted."""
    said = plan.predicted
    return {
        "seconds": said.step_seconds,
        "exposed_communication_seconds": said.exposed_communication_seconds,
        "peak_bytes": said.peak_bytes,
        "sent_bytes": _sent_bytes(setting, plan, cluster),
    }


def _sent_bytes(setting: Setting, plan: Plan, cluster: Cluster) -> list[float] | None:
    model, inputs = setting.model_and_inputs()
    try:
        return sent_bytes(_program(model, inputs, plan), plan, cluster)
    except (AutoparError, NotSeparable):
        return None


def _program(model: torch.nn.Module, inputs: Inputs, plan: Plan) -> Program:
    """The program that a plan runs once per micro-batch."""
    options, captures = Options(cluster=Cluster.parse("1 cpu"), optimizer=torch.optim.SGD), Captures()
    keywords: Mapping[str, torch.Tensor] = inputs
    whole = capture_program(model, (), dict(keywords), True, options, captures)
    at = functools.partial(capture_at, whole, model, (), dict(keywords), options, captures)
    return (
        whole if plan.pipeline is None and plan.micro_batches == 1 else in_parts(whole, plan.micro_batches, at).program
    )
