"""Known plans: what people write by hand for a cluster, completed by the planner on the same prices.

known_plans(Cluster.parse("8 H100-SXM"))      {"DDP": {"dp_replicate": 8}, "ZeRO-3": {"dp_shard": 8}, ...}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.layout import Mesh
from autopar.parallel_plan import Baseline, Plan
from autopar.planner.constraints import Constraints
from autopar.planner.mesh_shapes import resolve_meshes, same_links
from autopar.planner.one_mesh import plan_on_mesh
from autopar.planner.query import Progress, Query


def known_plans(cluster: Cluster) -> dict[str, dict[str, int]]:
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


def known_meshes(query: Query, meshes: Sequence[Mesh]) -> list[Mesh]:
    """The known plans on meshes of these shapes. Their constraints leave a smaller space, in which the limited search
    under a tight memory limit finds plans that it misses in the whole."""
    shapes = {mesh.shape for mesh in meshes}
    per_node = query.cluster.devices_per_node
    named = [resolve_meshes(query.cluster, None, dims)[0] for dims in known_plans(query.cluster).values()]
    return [mesh for mesh in named if any(same_links(mesh.shape, shape, per_node) for shape in shapes)]


def as_baseline(plan: Plan) -> Baseline:
    """The best of one mesh, as a line of the plan's comparison."""
    return Baseline(
        name=f"mesh {'x'.join(map(str, plan.mesh.shape))}",
        dims=dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
        objective_seconds=plan.objective_seconds,
        predicted=plan.predicted,
    )


def solved_known_plans(query: Query, meshes: Sequence[Mesh] | None, log: Progress) -> dict[str, Plan | str]:
    """The known plans, completed by the planner, on the same prices and without the user's own constraints; the error
    instead of a plan where there is none. meshes: only those of these shapes (None: all)."""
    free = replace(query, constraints=Constraints(), wishes=())
    shapes = None if meshes is None else {mesh.shape for mesh in meshes}
    found: dict[str, Plan | str] = {}
    for name, dims in known_plans(query.cluster).items():
        mesh = resolve_meshes(query.cluster, None, dims)[0]
        if shapes is not None and mesh.shape not in shapes:
            continue
        if query.deadline.left() <= 0.0:
            found[name] = "not priced: the time was over"
            continue
        try:
            found[name] = plan_on_mesh(free, mesh, log).plan
        except InfeasibleError as error:
            found[name] = str(error)
    return found


def baselines(query: Query, known: Mapping[str, Plan | str]) -> tuple[Baseline, ...]:
    """The known plans as lines of the plan's comparison."""
    dims = known_plans(query.cluster)
    return tuple(
        Baseline(name=name, dims=dims[name], error=plan)
        if isinstance(plan, str)
        else Baseline(name=name, dims=dims[name], objective_seconds=plan.objective_seconds, predicted=plan.predicted)
        for name, plan in known.items()
    )


def by_cost(known: Mapping[str, Plan | str]) -> list[Plan]:
    """The known plans that there are, the cheapest last."""
    plans = [plan for plan in known.values() if isinstance(plan, Plan)]
    return sorted(plans, key=lambda plan: -plan.objective_seconds)
