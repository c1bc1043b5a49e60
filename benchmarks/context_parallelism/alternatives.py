"""The ways as plans of ours: each by what any user has, `dims=`, `cp=` and constraints on attention.

    make_plans(setting, cluster)        # {"autopar": the free choice, "autopar as ring": Plan, ...}, {left out: reason}
"""

from __future__ import annotations

from typing import Any

import torch

import autopar
from autopar.cost_models.program_costs import collective_action, collective_of
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.plans.busiest_rank import busiest_place
from autopar.plans.parallel_plan import Plan
from benchmarks.netlab.pipelines.traffic import lowered_graphs
from benchmarks.plan_quality.captured import Captured
from benchmarks.plan_quality.plans import CHOSEN, FORCED, describe, different, predicted
from benchmarks.plan_quality.settings import Setting

ATTENTION = "*/attention#0"
CONTIGUOUS, ZIGZAG, HEADS = "S(2)", "S(2, zigzag)", "S(1)"


def wishes(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Name -> arguments of `autopar.Planner.plan` that ask for it."""
    ranks = cluster.num_devices
    ways: dict[str, dict[str, Any]] = {
        "ring": {"cp": "ring", "constraints": {ATTENTION: CONTIGUOUS}},
        "ring in zigzag": {"cp": "ring", "constraints": {ATTENTION: ZIGZAG}},
        "ulysses": {"cp": "ulysses", "constraints": {ATTENTION: HEADS}},
        "gather": {"cp": "gather", "constraints": {ATTENTION: ZIGZAG}},
    }
    found: dict[str, dict[str, Any]] = {CHOSEN: {"dims": {"cp": ranks}}}
    found |= {f"{FORCED}{name}": {"dims": {"cp": ranks}, "mode": "fast", **way} for name, way in ways.items()}
    if 1 < cluster.devices_per_node < ranks:
        inner = {"cp": ZIGZAG, "cp_inner": HEADS, "implementation": "ring"}
        dims = {"cp": ranks // cluster.devices_per_node, "cp_inner": cluster.devices_per_node}
        found[f"{FORCED}ring of heads"] = {"dims": dims, "mode": "fast", "constraints": {ATTENTION: inner}}
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


def predicted_waits(captured: Captured, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """What `predicted` says, and `host_seconds`, the processor's share of all collectives of the priced rank, and
    `awaited_seconds`: this and what the play leaves exposed. The share is used by the threads that move bytes while the
    rank waits; the play counts it among its kernels, since nothing hides it."""
    program, said = captured.program(plan), predicted(captured, plan, cluster)
    rank = busiest_place(plan, plan.mesh, program)
    nodes = [node for graph in lowered_graphs(program, plan, rank) for node in graph.nodes]
    started = [(node, kind) for node in nodes if (kind := collective_of(node)) is not None]
    host = sum(collective_action(node, kind, "", cluster, plan.mesh).host_seconds for node, kind in started)
    waits = {"host_seconds": host, "awaited_seconds": host + said["exposed_communication_seconds"]}
    return {**said, **waits, "collectives": len(started), "priced_rank": rank}


def in_words(plan: Plan) -> str:
    """The mesh, and how attention runs: "cp=4, ring s zigzag"."""
    ways = {_way(chosen) for name, chosen in plan.operators.items() if name.endswith("attention#0")}
    return f"{describe(plan)}, {' and '.join(sorted(ways))}"


def _way(chosen: Any) -> str:
    zigzag = any(getattr(placed, "zigzag", False) for placed in chosen.inputs[0])
    return f"{chosen.implementation} {'x'.join(map(str, chosen.axes))}{' zigzag' if zigzag else ''}"


