"""The ways as plans of ours: each by what any user has, `dims=` with the names whose presets are those ways.

    make_plans(setting, cluster)       # {"autopar": the free choice, "autopar as dispatch": Plan, ...}, {left out: why}
"""

from __future__ import annotations

from typing import Any

import torch

import autopar
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.plans.parallel_plan import Plan
from benchmarks.netlab.pipelines.traffic import link_bytes
from benchmarks.plan_quality.captured import Captured
from benchmarks.plan_quality.plans import CHOSEN, FORCED, describe, different, predicted
from benchmarks.plan_quality.settings import Setting


def wishes(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Name -> arguments of `autopar.Planner.plan` that ask for it. Without pipelines: whether to have one is a question
    of `benchmarks/plan_quality`."""
    ranks, inner = cluster.num_devices, cluster.devices_per_node
    ways = {"dispatch": {"ep": ranks}, "gather": {"dp_shard": ranks}, "replicated": {"dp_replicate": ranks}}
    if 1 < inner < ranks:
        ways["dispatch in nodes"] = {"dp_replicate": ranks // inner, "ep": inner}
    found: dict[str, dict[str, Any]] = {CHOSEN: {"with_baselines": True}}
    for name, dims in ways.items():
        found[f"{FORCED}{name}"] = {"dims": dims, "ep": "dispatch" if "ep" in dims else None, "mode": "fast"}
    return {name: {"micro_batches": 1, **arguments} for name, arguments in found.items()}


def make_plans(setting: Setting, cluster: Cluster) -> tuple[dict[str, Plan], dict[str, str]]:
    """Plans by name, and the reason for each that there is not. Plans that came out equal are kept once."""
    model, inputs = setting.model_and_inputs()
    planner = autopar.Planner(model, inputs, cluster=cluster, optimizer=torch.optim.SGD)
    found: dict[str, Plan] = {}
    reasons: dict[str, str] = {}
    for name, arguments in wishes(cluster).items():
        try:
            found[name] = planner.plan(**arguments)
        except AutoparError as error:
            reasons[name] = str(error)
    return different(found, reasons, print), reasons


def predicted_links(captured: Captured, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """What `predicted` says, and `link_bytes` [from][to] between nodes."""
    links = link_bytes(captured.program(plan), plan, cluster)
    return {**predicted(captured, plan, cluster), "link_bytes": links}


def in_words(plan: Plan) -> str:
    """The mesh, and what its axes split of the products of experts: "ep=4, experts t+e"."""
    ways = {" x ".join(map(str, chosen.axes)) for name, chosen in plan.operators.items() if "expert_" in name}
    return f"{describe(plan)}, experts {' and '.join(sorted(ways))}"
