"""Pipelines that nobody asked for: compared with the plan without stages where the question leaves both open.

    several nodes, neither mesh= nor dims=     a few, for `QUICK_SHARE` of the time so far (`quick.py`)
    mode="max"                                 every number of groups that the devices allow

On one node the links between stages are those inside of them, so pipelines are compared there only where memory binds:
where the plan recomputes, or runs the batch in parts, and where nothing without stages fits (`pipeline_instead`). What
is compared is the predicted step; the bound of a pipeline is one of those that were compared. A batch that cannot be
cut, or a model with too few blocks, is a reason in the notes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.errors import ConfigurationError, InfeasibleError
from autopar.parallel_plan import Plan
from autopar.plan_text import format_seconds
from autopar.planner.least_memory import least_state_bytes
from autopar.planner.micro_batches import AtBatch
from autopar.planner.query import Progress, Query
from autopar.planner.solver.deadline import Deadline
from autopar.planner.stages.plan import PipelineWish, plan_pipeline
from autopar.planner.stages.quick import compare_pipelines, what_was_compared, write_compared
from autopar.planner.stages.submesh import sub_cluster

MOST_GROUPS = 16
QUICK_SHARE = 0.15
"""Of the CPU seconds that the search without stages took."""
INSTEAD_SECONDS = 60.0
"""By the clock, for pipelines whose layouts are chosen under the memory limit, where nothing else fits."""


def with_pipelines(
    query: Query, plan: Plan, micro_batches: int | None, at_batch: AtBatch | None, spent_seconds: float, log: Progress
) -> Plan:
    """The plan, or a pipeline that is predicted to be faster, with notes on the other. query: of the whole batch;
    spent_seconds: CPU seconds of the search so far, of which pipelines take a share (but for mode="max")."""
    reason = _why_not(query, at_batch)
    if query.search.compares_all_pipelines:
        pipeline, reason = (None, reason) if reason else best_free_pipeline(query, micro_batches, at_batch, log)
        return better_by_prediction(plan, pipeline, reason)
    if reason or at_batch is None or not _is_worth_a_look(query, plan):
        return plan
    step = plan.predicted.step_seconds
    compared = compare_pipelines(query, micro_batches, at_batch, step, QUICK_SHARE * spent_seconds, log)
    notes = what_was_compared(compared)
    try:
        pipeline = write_compared(query, compared)
    except (ConfigurationError, InfeasibleError) as error:
        pipeline, notes = None, [*notes, f"no pipeline: {error}"]
    if pipeline is None:
        return replace(plan, notes=(*plan.notes, *notes))
    best = better_by_prediction(plan, pipeline, "")
    return replace(best, notes=(*best.notes, *notes))


def pipeline_instead(
    query: Query, micro_batches: int | None, at_batch: AtBatch | None, spent_seconds: float, log: Progress
) -> Plan | None:
    """A pipeline where nothing without stages fits; None where none does. Arguments as of `with_pipelines`.

    First those of the quick comparison, for as long as the search without stages took; their sub-meshes are solved
    without a memory limit, so where none of them fits, every number of groups is planned under it.
    """
    if at_batch is None or _why_not(query, at_batch):
        return None
    if not query.search.compares_all_pipelines:
        compared = compare_pipelines(query, micro_batches, at_batch, math.inf, spent_seconds, log)
        try:
            pipeline = write_compared(query, compared)
        except (ConfigurationError, InfeasibleError) as error:
            log(f"no pipeline: {error}")
        else:
            if pipeline is not None:
                return replace(pipeline, notes=(*pipeline.notes, *what_was_compared(compared)))
        until = Deadline.after(min(INSTEAD_SECONDS, query.deadline.left()), query.deadline.stop)
        query = replace(query, deadline=until)
    pipeline, reasons = best_free_pipeline(query, micro_batches, at_batch, log)
    if pipeline is None:
        log(f"no pipeline: {reasons}")
    return pipeline


def _why_not(query: Query, at_batch: AtBatch | None) -> str:
    """Why no pipeline is looked at; empty where some are."""
    if at_batch is None:
        return "stages take the batch in parts, and the program is given at one size only"
    if not any(output.role == "loss" for output in query.program.outputs):
        return "stages take the batch in parts, and the model returns no loss to add up"
    if least_state_bytes(query.state_bytes, query) > query.budget_bytes:
        return "stages do not help: parameters and their states alone are too large"
    return ""


def _is_worth_a_look(query: Query, plan: Plan) -> bool:
    memory_binds = plan.micro_batches > 1 or any(operator.recompute for operator in plan.operators.values())
    return query.cluster.num_nodes > 1 or memory_binds


def best_free_pipeline(
    query: Query, micro_batches: int | None, at_batch: AtBatch | None, log: Progress
) -> tuple[Plan | None, str]:
    """(the best pipeline over all numbers of groups or None, why not more of them). query: of the whole batch."""
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
        bound = min(plan.bound_seconds, pipeline.bound_seconds)
        return replace(
            pipeline,
            bound_seconds=bound,
            gap=1.0 - bound / pipeline.objective_seconds,
            baselines=plan.baselines,
            alternatives=plan.alternatives,
            notes=(*pipeline.notes, other),
        )
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
