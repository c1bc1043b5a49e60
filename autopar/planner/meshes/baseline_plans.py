"""Baselines: what people write by hand for a cluster, completed by the planner on the same prices.

baseline_plans(Cluster.parse("8 H100-SXM"))   {"DDP": {"dp_replicate": 8}, "ZeRO-3": {"dp_shard": 8}, ...}
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

from autopar.errors import InfeasibleError
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.meshes.least_memory import why_states_do_not_fit
from autopar.planner.meshes.mesh_shapes import resolve_meshes
from autopar.planner.one_mesh.mesh_plan import Candidate, plan_on_mesh
from autopar.planner.one_mesh.query import Query
from autopar.planner.problem.limits import LIMITS
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import OUT_OF_TIME, Baseline
from autopar.request.constraints import Constraints

Shapes: TypeAlias = Collection[tuple[int, ...]]
"""Sizes of the axes of meshes."""
Baselines: TypeAlias = Mapping[str, Candidate | InfeasibleError]
"""Baselines by name; the error where there is none."""


def baseline_plans(cluster: Cluster) -> dict[str, dict[str, int]]:
    """The plans that people write by hand for this cluster: name -> dims."""
    n, per_node = cluster.num_devices, cluster.devices_per_node
    if n == 1:
        return {}
    plans = {"DDP": {"dp_replicate": n}, "ZeRO-3": {"dp_shard": n}}
    if cluster.num_nodes > 1 and per_node > 1:
        plans["HSDP"] = {"dp_replicate": cluster.num_nodes, "dp_shard": per_node}
        plans["ZeRO-3 x TP"] = {"dp_shard": cluster.num_nodes, "tp": per_node}
    else:
        plans["Megatron TP"] = {"tp": n}
        if n % 2 == 0 and n > 2:
            plans["ZeRO-3 x TP"] = {"dp_shard": n // 2, "tp": 2}
    return plans


def baseline_meshes(cluster: Cluster, shapes: Shapes | None) -> dict[str, Mesh]:
    """The meshes of the baselines by name, those of these shapes (None: all)."""
    found = {name: resolve_meshes(cluster, None, dims)[0] for name, dims in baseline_plans(cluster).items()}
    return {name: mesh for name, mesh in found.items() if shapes is None or mesh.shape in shapes}


def as_baseline(plan: Plan) -> Baseline:
    """The best of one mesh, as a line of the plan's comparison."""
    return Baseline(
        name=f"mesh {'x'.join(map(str, plan.mesh.shape))}",
        dims=dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
        objective_seconds=plan.objective_seconds,
        predicted=plan.predicted,
    )


def solved_baselines(query: Query, shapes: Shapes | None, below: float = math.inf) -> Baselines:
    """The baselines, each completed by the planner on the same prices, without the user's own constraints.

    shapes: of the meshes that count (None: all). below: plans whose bound in seconds is no smaller are left out.
    """
    free = replace(query, constraints=Constraints(), bound_constraints=(), shards=None)
    found: dict[str, Candidate | InfeasibleError] = {}
    for name, mesh in baseline_meshes(query.cluster, shapes).items():
        if query.deadline.left() <= 0.0:
            found[name] = InfeasibleError(OUT_OF_TIME)
            continue
        refused = why_states_do_not_fit(free, mesh)
        if refused is not None:
            found[name] = refused
            continue
        try:
            found[name] = plan_on_mesh(free, mesh, below)
        except InfeasibleError as error:
            found[name] = error
    return found


class KnownPlans:
    """The baselines beside one search, solved when somebody first asks for them. shapes: of the meshes on which one
    may be the answer (None: any); are_shown: whether all are solved in any case, since the user wants to see them."""

    def __init__(self, query: Query, shapes: Shapes | None, are_shown: bool) -> None:
        self._query, self._shapes, self._are_shown = query, shapes, are_shown

    @cached_property
    def _all(self) -> Baselines:
        return solved_baselines(self._query, None)

    @property
    def step_seconds(self) -> float:
        """Of the shortest played step of one that may be the answer, where they are shown; else infinity."""
        known = usable(self._all, self._shapes) if self._are_shown else []
        return min((entry.plan.predicted.step_seconds for entry in known), default=math.inf)

    def beside(self, plan: Plan, other_seconds: float) -> Baselines:
        """All of them where they are shown, else those that may help a plan with a gap, which then must be cheaper than
        it and than other_seconds."""
        if self._are_shown:
            return self._all
        below = min(plan.objective_seconds, other_seconds)
        return solved_baselines(self._query, self._shapes, below) if plan.gap > LIMITS.open_gap else {}


def cheapest(known: Baselines, shapes: Shapes | None) -> Candidate | None:
    """The cheapest of the baselines there are, on meshes of these shapes (None: of any)."""
    return min(usable(known, shapes), key=lambda entry: entry.plan.objective_seconds, default=None)


def usable(known: Baselines, shapes: Shapes | None) -> list[Candidate]:
    """The baselines there are, on meshes of these shapes (None: of any)."""
    plans = [entry for entry in known.values() if isinstance(entry, Candidate)]
    return [entry for entry in plans if shapes is None or entry.mesh.shape in shapes]


def baselines(query: Query, known: Baselines) -> tuple[Baseline, ...]:
    """The baselines as lines of the plan's comparison."""
    dims = baseline_plans(query.cluster)
    return tuple(
        Baseline(
            name=name,
            dims=dims[name],
            objective_seconds=entry.plan.objective_seconds,
            predicted=entry.plan.predicted,
        )
        if isinstance(entry, Candidate)
        else Baseline(name=name, dims=dims[name], error=str(entry))
        for name, entry in known.items()
    )
