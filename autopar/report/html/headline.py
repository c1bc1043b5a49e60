"""What stands at the top of a report: the figures of the plan, its mesh over the links, and why not another plan."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Cluster, GroupTopology, MixedCluster
from autopar.errors import ConfigurationError
from autopar.parallel_plan import PIPELINE_AXIS, Baseline, Plan
from autopar.plan_text import ROUNDING, format_bytes, format_mesh, format_seconds
from autopar.report.html.timeline import RecordedStep


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its name and what it means."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of the mesh: where its groups lie. link: what its collectives cross; "" where that is not known."""

    name: str
    size: int
    link: str
    crosses_nodes: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A plan that was not taken: its name and mesh, and why."""

    name: str
    mesh: str
    reason: str


def headline(plan: Plan, timeline: RecordedStep | None) -> list[Figure]:
    """Step, memory, bound and gap, and where the prices come from."""
    tier, _, source = plan.profile.partition(": ")
    figures = [
        Figure("step", format_seconds(plan.predicted.step_seconds), "predicted by the cost model"),
        Figure("memory", format_bytes(plan.predicted.peak_bytes), "peak of a device" + _limit(plan)),
        Figure("cost", format_seconds(plan.objective_seconds), "what the search made small: nothing in it overlaps"),
        Figure("lower bound", format_seconds(plan.bound_seconds), "no plan on this mesh costs less at these prices"),
        Figure("gap", "0" if plan.gap <= ROUNDING else f"{plan.gap:.2%}", _gap_meaning(plan)),
        Figure("prices", tier, source or "where the seconds come from"),
        Figure(
            "waiting",
            format_seconds(plan.predicted.exposed_communication_seconds),
            "communication that no computation hides",
        ),
    ]
    used = _utilisation(plan)
    if used is not None:
        figures.append(used)
    if plan.pipeline is not None:
        schedule = f"{plan.mesh.shape[0]} rank groups, {len(plan.pipeline.stages)} stages"
        figures.append(Figure("schedule", plan.pipeline.schedule, f"{schedule}, {plan.micro_batches} micro-batches"))
    elif plan.micro_batches > 1:
        figures.append(Figure("micro-batches", str(plan.micro_batches), "parts of the batch, one after the other"))
    if timeline is not None:
        figures.append(Figure("simulated", format_seconds(timeline.seconds), "the lowered program, action by action"))
    return figures


def _gap_meaning(plan: Plan) -> str:
    """What the gap belongs to; the bound over all meshes is weaker than that of the chosen one."""
    meaning = "proven optimal on this mesh" if plan.gap <= ROUNDING else "the most that is lost on this mesh"
    over_all = plan.statistics.get("gap_over_all_meshes")
    known = isinstance(over_all, int | float) and over_all > max(plan.gap, ROUNDING)
    return f"{meaning}; at most {over_all:.1%} over all meshes" if known else meaning


def _utilisation(plan: Plan) -> Figure | None:
    """FLOPs of the model per second and device, beside the fastest product measured; None where no one counted."""
    cluster, flops = _cluster(plan), plan.statistics.get("flops_of_pass")
    if cluster is None or not isinstance(flops, int | float) or not plan.predicted.step_seconds:
        return None
    dtype = "bfloat16" if plan.question.get("precision") == "bf16" else "float32"
    ceiling = cluster.device.flops_per_second.get(dtype)
    if ceiling is None:
        return None
    rate = flops * plan.micro_batches / plan.predicted.step_seconds / plan.num_ranks
    fastest = f"{ceiling / 1e12:.3g} TFLOP/s, the fastest {dtype} product measured"
    return Figure("utilisation (MFU)", f"{rate / ceiling:.1%}", f"{rate / 1e12:.3g} of {fastest}")


def _limit(plan: Plan) -> str:
    limit = plan.question.get("memory_limit_bytes")
    return f", of {format_bytes(float(limit))} allowed" if isinstance(limit, int | float) else ""


def mesh_axes(plan: Plan) -> list[Axis]:
    """Every axis with the link that its collectives cross."""
    cluster = _cluster(plan)
    return [_axis(plan, cluster, index) for index in range(len(plan.mesh.shape))]


def _cluster(plan: Plan) -> Cluster | None:
    """None where the plan was made for a cluster that its name does not describe, or for several kinds of devices."""
    try:
        cluster = Cluster.parse(plan.cluster)
    except ConfigurationError:
        return None
    return None if isinstance(cluster, MixedCluster) or cluster.num_devices != plan.num_ranks else cluster


def _axis(plan: Plan, cluster: Cluster | None, index: int) -> Axis:
    name, size = plan.mesh.axis_names[index], plan.mesh.shape[index]
    if cluster is None or (plan.pipeline is not None and plan.pipeline.groups):
        return Axis(name, size, "", False)
    topology = GroupTopology.of(cluster, plan.mesh.shape, (index,))
    if topology.nodes > 1:
        sharing = f", {topology.groups_per_node} groups share a node's network" if topology.groups_per_node > 1 else ""
        what = "messages between stages" if name == PIPELINE_AXIS else f"groups over {topology.nodes} nodes"
        return Axis(name, size, f"{what}{sharing}", True)
    return Axis(name, size, f"inside a node of {cluster.devices_per_node}", False)


def why_not(plan: Plan) -> list[Refused]:
    """Known plans and other meshes, each with what speaks against it."""
    own = plan.predicted.step_seconds
    return [
        Refused(other.name, format_mesh(other.dims), _reason(other, plan, own))
        for other in (*plan.baselines, *plan.alternatives)
    ]


def _reason(other: Baseline, plan: Plan, own: float) -> str:
    if other.error is not None:
        return other.error
    if other.predicted is not None:
        step = other.predicted.step_seconds
        share = f"{step / own:.2f} x the step ({format_seconds(step)})" if own else format_seconds(step)
        return f"{share}, {format_bytes(other.predicted.peak_bytes)} a device"
    if other.objective_seconds is not None:
        return f"costs {format_seconds(other.objective_seconds)} against {format_seconds(plan.objective_seconds)}"
    if other.bound_seconds is not None:
        return f"cannot cost less than {format_seconds(other.bound_seconds)}"
    return "not priced"
