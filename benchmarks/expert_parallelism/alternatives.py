"""The ways as plans of ours: each by what any user has, `dims=` with the names whose presets are those ways.

    make_plans(setting, cluster, loads)  # {"autopar": the free choice, "autopar as dispatch": Plan, ...}, {absent: why}

Plans are made for the loads that experts have in the first step. Where these are not even, one is made blind, too, and
a dispatch without copies of busy experts.
"""

from __future__ import annotations

from collections.abc import Sequence
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

LAYER = "layers.{}.feed_forward"
"""The module that has the experts of a layer."""
BLIND = f"{FORCED}chosen blind"
"""The free choice where nothing is said of the load."""


def wishes(cluster: Cluster, loads: Sequence[Sequence[float]] = ()) -> dict[str, dict[str, Any]]:
    """Name -> arguments of `autopar.Planner.plan` that ask for it. loads: of the experts, per layer; none: even.
    Without pipelines: whether to have one is a question of `benchmarks/plan_quality`."""
    ranks, inner = cluster.num_devices, cluster.devices_per_node
    load = {"expert_load": _by_module(loads)} if loads else {}
    on_all = {"dims": {"ep": ranks}, "mode": "fast"}
    ways: dict[str, dict[str, Any]] = {
        "dispatch": {**on_all, "ep": "dispatch"},
        "masked": {**on_all, "ep": "masked"},
        "gather": {"dims": {"dp_shard": ranks}, "mode": "fast"},
        "replicated": {"dims": {"dp_replicate": ranks}, "mode": "fast"},
    }
    if 1 < inner < ranks:
        ways["dispatch in nodes"] = {**on_all, "dims": {"dp_replicate": ranks // inner, "ep": inner}, "ep": "dispatch"}
        ways["dispatch in two hops"] = {**on_all, "ep": "two_level"}
    if loads:
        ways["dispatch without copies"] = {**ways["dispatch"], "replicated_experts": 0}
    found = {CHOSEN: {"with_baselines": True}, **{f"{FORCED}{name}": asked for name, asked in ways.items()}}
    found = {name: {**asked, **load} for name, asked in found.items()}
    if loads:
        found[BLIND] = {"with_baselines": True}
    return {name: {"micro_batches": 1, **asked} for name, asked in found.items()}


def make_plans(
    setting: Setting, cluster: Cluster, loads: Sequence[Sequence[float]] = ()
) -> tuple[dict[str, Plan], dict[str, str]]:
    """Plans by name for these loads, and the reason for each that there is not. Equal plans are kept once."""
    model, inputs = setting.model_and_inputs()
    planner = autopar.Planner(model, inputs, cluster=cluster, optimizer=torch.optim.SGD)
    found: dict[str, Plan] = {}
    reasons: dict[str, str] = {}
    for name, arguments in wishes(cluster, loads).items():
        try:
            found[name] = planner.plan(**arguments)
        except AutoparError as error:
            reasons[name] = str(error)
    return different(found, reasons, print), reasons


def _by_module(loads: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    return {LAYER.format(layer): [*shares] for layer, shares in enumerate(loads)}


def under_load(plan: Plan, loads: Sequence[Sequence[float]]) -> Plan:
    """The plan as if it had been made for these loads: what it sends is that, whoever made it blind."""
    return plan.with_(question={**plan.question, "expert_load": _by_module(loads)}) if loads else plan


def predicted_links(captured: Captured, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """What `predicted` says, and `link_bytes` [from][to] between nodes."""
    links = link_bytes(captured.program(plan), plan, cluster)
    return {**predicted(captured, plan, cluster), "link_bytes": links}


def in_words(plan: Plan) -> str:
    """The mesh, and what its axes split of the products of experts: "ep=4, experts t+e"."""
    ways = {" x ".join(map(str, chosen.axes)) for name, chosen in plan.operators.items() if "expert_" in name}
    return f"{describe(plan)}, experts {' and '.join(sorted(ways))}"
