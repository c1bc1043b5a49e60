"""The ways as plans of ours: each by what any user has, `dims=`, `cp=` and constraints on attention.

    make_plans(setting, cluster)        # {"autopar": the free choice, "autopar as ring": Plan, ...}, {left out: reason}
"""

from __future__ import annotations

from typing import Any

import torch

import autopar
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.plans.parallel_plan import Plan
from benchmarks.plan_quality.plans import CHOSEN, FORCED, describe, different
from benchmarks.plan_quality.settings import Setting

ATTENTION = "*/attention#0"
CONTIGUOUS, ZIGZAG, HEADS = "S(2)", "S(2, zigzag)", "S(1)"


def wishes(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Name -> arguments of `autopar.Planner.plan` that ask for it."""
    ranks = cluster.num_devices
    ways: dict[str, dict[str, Any]] = {
        "ring": {"cp": "ring", "constraints": {ATTENTION: CONTIGUOUS}},
        "ring in zigzag": {"cp": "ring", "constraints": {ATTENTION: ZIGZAG}},
        "ulysses": {"cp": "ulysses"},
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


def in_words(plan: Plan) -> str:
    """The mesh, and how attention runs: "cp=4, ring s zigzag"."""
    ways = {_way(chosen) for name, chosen in plan.operators.items() if name.endswith("attention#0")}
    return f"{describe(plan)}, {' and '.join(sorted(ways))}"


def _way(chosen: Any) -> str:
    zigzag = any(getattr(placed, "zigzag", False) for placed in chosen.inputs[0])
    return f"{chosen.implementation} {'x'.join(map(str, chosen.axes))}{' zigzag' if zigzag else ''}"


