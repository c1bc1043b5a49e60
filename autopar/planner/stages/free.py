"""Pipelines that nobody asked for: every number of groups that the devices allow, where the question leaves it open.

    mode="max", neither mesh= nor dims=      the best pipeline, and the better of it and the best plan without stages

What is compared is the predicted step: that of a pipeline is simulated and has no bound but that of perfect work. A
batch that cannot be cut, or a model with too few blocks, is a reason in the notes. Other modes do not try pipelines.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import ConfigurationError, InfeasibleError
from autopar.parallel_plan import Plan
from autopar.plan_text import format_seconds
from autopar.planner.least_memory import least_state_bytes
from autopar.planner.micro_batches import AtBatch
from autopar.planner.query import Progress, Query
from autopar.planner.stages.plan import PipelineWish, plan_pipeline
from autopar.planner.stages.submesh import sub_cluster

MOST_GROUPS = 16


def best_free_pipeline(
    query: Query, micro_batches: int | None, at_batch: AtBatch | None, log: Progress
) -> tuple[Plan | None, str]:
    """(the best pipeline over all numbers of groups or None, why not more of them). query: of the whole batch."""
    if at_batch is None:
        return None, "stages take the batch in parts, and the program is given at one size only"
    if not any(output.role == "loss" for output in query.program.outputs):
        return None, "stages take the batch in parts, and the model returns no loss to add up"
    if least_state_bytes(query.state_bytes, query) > query.budget_bytes:
        return None, "stages do not help: parameters and their states alone are too large"
    best: Plan | None = None
    reasons: dict[str, None] = {}
    for groups in _group_counts(query):
        try:
            plan = plan_pipeline(query, PipelineWish(num_groups=groups, dims={}), micro_batches, at_batch, log)
        except (ConfigurationError, InfeasibleError) as reason:
            reasons[str(reason)] = None
            continue
        if best is None or plan.predicted.step_seconds < best.predicted.step_seconds:
            best = plan
        if query.deadline.left() <= 0.0:
            break
    return best, "; ".join(reasons)


def better_by_prediction(plan: Plan, pipeline: Plan | None, reason: str) -> Plan:
    """The plan or the pipeline, whichever is predicted to be faster, with a note on the other one."""
    if pipeline is None:
        return replace(plan, notes=(*plan.notes, f"no pipeline: {reason}"))
    steps = [format_seconds(each.predicted.step_seconds) for each in (plan, pipeline)]
    if pipeline.predicted.step_seconds < plan.predicted.step_seconds:
        other = (
            f"without stages the best plan is predicted to take {steps[0]} (bound {format_seconds(plan.bound_seconds)})"
        )
        return replace(pipeline, notes=(*pipeline.notes, other))
    return replace(
        plan, notes=(*plan.notes, f"the best pipeline (pp={pipeline.mesh.shape[0]}) is predicted at {steps[1]}")
    )


def _group_counts(query: Query) -> list[int]:
    """Numbers of groups that cut the cluster evenly, at nodes or inside them."""
    found = []
    for groups in range(2, min(query.cluster.num_devices, MOST_GROUPS) + 1):
        try:
            sub_cluster(query.cluster, groups)
        except ConfigurationError:
            continue
        found.append(groups)
    return found
