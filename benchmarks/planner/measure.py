"""One case of the planner benchmark, phase by phase, from importing torch to the lowered program of one rank."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable
from typing import Any, TypeVar

STARTED = (time.perf_counter(), time.process_time())

import torch  # noqa: E402 - what importing costs is a phase of its own

from autopar.capture import Captures  # noqa: E402
from autopar.hardware.cluster import Cluster  # noqa: E402
from autopar.planner.planning import make_plan  # noqa: E402
from autopar.plans.parallel_plan import Plan  # noqa: E402
from autopar.plans.plan_value import Baseline  # noqa: E402
from autopar.questions import CapturedModel, capture_model  # noqa: E402
from autopar.request import Request  # noqa: E402
from autopar.timing import PhaseTime, PhaseTimes, cpu_seconds  # noqa: E402
from benchmarks.models import WORKLOADS, workload  # noqa: E402
from benchmarks.planner.cases import Case  # noqa: E402

IMPORTS = PhaseTime(time.perf_counter() - STARTED[0], time.process_time() - STARTED[1])
INSIDE = {"price": "enumerate and price", "solve": "solve", "predict": "predict", "lower": "lower"}

Result = TypeVar("Result")


def measure(case: Case) -> dict[str, Any]:
    """Plan one case; one row of the report. CPU seconds count this process and its children."""
    batch = case.batch or WORKLOADS[case.workload].batch
    (model, inputs), building = timed(lambda: workload(case.workload, batch=batch))
    request = request_of(case)
    show_progress()
    with PhaseTimes() as times:
        captured, capturing = timed(lambda: capture_model(model, (), dict(inputs), request, Captures(), training=True))
        tidy = times.phases.get("tidy", PhaseTime(0.0, 0.0))
        plan, planning = timed(lambda: plan_case(captured))
    spent = {name: times.phases.get(name, PhaseTime(0.0, 0.0)) for name in ("capture", *INSIDE)}
    again = less(spent["capture"], capturing)
    phases = {
        "imports": IMPORTS,
        "build model": building,
        "capture": less(capturing, tidy),
        "tidy": tidy,
        **{label: spent[name] for name, label in INSIDE.items()},
        "captures at other batches": again,
        "other planning": less(planning, again, *(spent[name] for name in INSIDE)),
    }
    return {
        "case": case.name,
        "workload": case.workload,
        "devices": case.devices,
        "mesh_is_given": case.mesh is not None,
        "global_batch": batch,
        "seq": WORKLOADS[case.workload].seq,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "nodes": len(captured.program.graph.nodes),
        "phases": {key: {"seconds": t.seconds, "cpu_seconds": t.cpu_seconds} for key, t in phases.items()},
        "cpu_seconds": cpu_seconds(),
        "goal_cpu_seconds": case.goal_seconds,
        "must_cpu_seconds": case.must_seconds,
        "peak_rss_bytes": peak_rss_bytes(),
        "torch": torch.__version__,
        **of_plan(plan),
    }


def of_plan(plan: Plan) -> dict[str, Any]:
    """What a row says of a plan, and of the other meshes that were looked at."""
    return {
        "mesh": dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
        "micro_batches": plan.micro_batches,
        "pipeline": None if plan.pipeline is None else plan.pipeline.schedule,
        "statistics": dict(plan.statistics),
        "objective_seconds": plan.objective_seconds,
        "bound_seconds": plan.bound_seconds,
        "gap": plan.gap,
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "predicted_step_seconds": plan.predicted.step_seconds,
        "notes": list(plan.notes),
        "alternatives": [of_baseline(other) for other in plan.alternatives],
    }


def of_baseline(other: Baseline) -> dict[str, Any]:
    """Another mesh, as solved or as dropped."""
    return {"name": other.name, "objective_seconds": other.objective_seconds, "error": other.error}


def request_of(case: Case) -> Request:
    """The plan with AdamW; where the mesh is free, micro-batches and pipelines are compared as `autopar.plan` does."""
    return Request(
        cluster=cluster_of(case.devices),
        mesh=case.mesh,
        optimizer=torch.optim.AdamW,
        memory_limit=case.memory_limit,
        with_baselines=case.with_baselines,
    )


def plan_case(captured: CapturedModel) -> Plan:
    """The plan of a case."""
    return make_plan(captured.program, captured.request, recapture=captured)


class Progress(logging.Formatter):
    """CPU seconds since the start in front of every line, for people who wait."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{cpu_seconds():8.1f} {super().format(record)}"


def show_progress() -> None:
    """What the planner says, on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(Progress())
    logger = logging.getLogger("autopar.planner")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def cluster_of(devices: int) -> Cluster:
    """H100 nodes of eight, or one smaller node."""
    return Cluster.parse(f"{max(1, devices // 8)}x{min(devices, 8)} H100-SXM")


def timed(work: Callable[[], Result]) -> tuple[Result, PhaseTime]:
    """The result of `work` and what it took."""
    started, started_cpu = time.perf_counter(), cpu_seconds()
    result = work()
    return result, PhaseTime(time.perf_counter() - started, cpu_seconds() - started_cpu)


def less(whole: PhaseTime, *parts: PhaseTime) -> PhaseTime:
    """What remains of `whole`."""
    return PhaseTime(
        whole.seconds - sum(part.seconds for part in parts),
        whole.cpu_seconds - sum(part.cpu_seconds for part in parts),
    )


def peak_rss_bytes() -> int:
    """The most memory that this process, or one of its children, held."""
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
