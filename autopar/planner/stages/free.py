"""Pipelines that nobody asked for: compared with the plan without stages where the question leaves both open.

    several nodes, neither mesh= nor dims=     a few, for a share of the time so far (`quick.py`)
    mode="max"                                 every number of groups that the devices allow

On one node the links between stages are those inside of them, so pipelines are compared there only where memory binds:
where the plan recomputes, or runs the batch in parts, and where nothing without stages fits (`pipeline_instead`). What
is compared is the predicted step; the bound of a pipeline is one of those that were compared. A batch that cannot be
cut, or a model with too few blocks, is a reason in the notes.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace

from autopar.errors import ConfigurationError, InfeasibleError
from autopar.parallel_plan import Plan
from autopar.plan_text import format_seconds
from autopar.plan_value import Baseline
from autopar.planner.choose_mesh import Chosen
from autopar.planner.least_memory import least_state_bytes
from autopar.planner.limits import LIMITS
from autopar.planner.query import Query
from autopar.planner.solver.deadline import Deadline
from autopar.planner.stages.groups import sub_cluster
from autopar.planner.stages.plan import plan_pipeline
from autopar.planner.stages.quick import (
    Compared,
    compare_pipelines,
    others_compared,
    pipelines_promise,
    what_was_compared,
    write_compared,
)
from autopar.planner.stages.wish import PipelineWish

log = logging.getLogger(__name__)


class FreePipelines:
    """The pipelines beside one search without stages. query: of the whole batch; began: CPU seconds of the process when
    the search began, of which pipelines take a share (but for mode="max")."""

    def __init__(self, query: Query, began: float) -> None:
        self._query, self._began = query, began
        self._compared: Compared | None = None

    @property
    def step_seconds(self) -> float:
        """Of the best pipeline that was compared so far; infinity where there is none."""
        return math.inf if self._compared is None else self._compared.step_seconds

    def before_finer(self, free_seconds: float) -> float:
        """As a `Rival`, before meshes of more axes are solved: as `before_fitting` where pipelines look faster than
        the best of the others, free_seconds; else infinity."""
        query = self._query
        if query.search.compares_all_pipelines or query.cluster.num_nodes == 1 or _why_not(query):
            return math.inf
        return self.before_fitting(free_seconds) if pipelines_promise(query, free_seconds) else math.inf

    def before_fitting(self, free_seconds: float) -> float:
        """As a `Rival`: the predicted step of the best pipeline, infinity where none is found. free_seconds:
        of a step without stages and without a memory limit. Pipelines are compared once, by whoever asks first."""
        return self._step_seconds(free_seconds, None)

    def before_more_parts(self, plan: Plan | None) -> float:
        """The same before more micro-batches are tried without stages. plan: of one part, if something fits."""
        if plan is not None:
            return self._step_seconds(plan.predicted.step_seconds, _work_seconds(plan))
        return self.step_seconds

    def _step_seconds(self, plain_seconds: float, work_seconds: float | None) -> float:
        query = self._query
        if query.search.compares_all_pipelines or _why_not(query):
            return math.inf
        if self._compared is None:
            spent = time.process_time() - self._began
            self._compared = compare_pipelines(query, plain_seconds, work_seconds, spent)
        return self._compared.step_seconds

    def better_of(self, plan: Plan) -> Plan:
        """The plan, or a pipeline that is predicted to be faster, with notes on the other."""
        query = self._query
        reason = _why_not(query)
        if query.search.compares_all_pipelines:
            pipeline, reason = (None, reason) if reason else best_free_pipeline(query)
            return better_by_prediction(plan, pipeline, reason)
        if reason or (self._compared is None and not _is_worth_a_look(query, plan)):
            return plan
        step = self._step_seconds(plan.predicted.step_seconds, _work_seconds(plan))
        notes, pipeline = self._notes(), None
        if step < plan.predicted.step_seconds:
            pipeline = self._written(notes)
        if pipeline is None:
            return replace(plan, notes=(*plan.notes, *notes))
        best = better_by_prediction(plan, pipeline, "")
        return replace(best, notes=(*best.notes, *notes))

    def instead(self, chosen: Chosen) -> Plan | None:
        """The pipeline for which no mesh was fitted into memory; None where none was compared, or none can be run."""
        notes = self._notes()
        pipeline = self._written(notes)
        if pipeline is None or not chosen.free_bounds:
            return None
        least = min(chosen.free_bounds.values())
        bound = min(least, pipeline.bound_seconds)
        meshes = sorted(chosen.free_bounds.items(), key=lambda item: (item[1], item[0].shape))
        others = tuple(
            Baseline(
                name=f"without stages, mesh {'x'.join(map(str, mesh.shape))}",
                dims=dict(zip(mesh.axis_names, mesh.shape, strict=True)),
                bound_seconds=seconds,
            )
            for mesh, seconds in meshes
        )
        note = (
            f"without stages no plan was searched: of the {len(meshes)} meshes that were solved, each takes at least "
            f"{format_seconds(least)}, and the best one does not fit"
        )
        return replace(
            pipeline,
            bound_seconds=bound,
            gap=1.0 - bound / pipeline.objective_seconds,
            alternatives=(*others[:1], *pipeline.alternatives, *others[1:]),
            notes=(*pipeline.notes, note, *notes),
        )

    def _notes(self) -> list[str]:
        return [] if self._compared is None else what_was_compared(self._compared)

    def _written(self, notes: list[str]) -> Plan | None:
        """The plan of the best pipeline; None where there is none, or a reason added to the notes."""
        compared = self._compared
        if compared is None:
            return None
        try:
            pipeline = write_compared(self._query, compared)
        except (ConfigurationError, InfeasibleError) as error:
            notes.append(f"no pipeline: {error}")
            return None
        return None if pipeline is None else replace(pipeline, alternatives=others_compared(compared))


def _work_seconds(plan: Plan) -> float | None:
    """What devices compute, if nothing is computed twice; None: unknown."""
    again = any(operator.recompute for operator in plan.operators.values())
    return None if again else plan.predicted.compute_seconds


def pipeline_instead(query: Query, spent_seconds: float) -> Plan | None:
    """A pipeline where nothing without stages fits; None where none does. query: of the whole batch; spent_seconds: CPU
    seconds of the search without stages.

    First those of the quick comparison, for as long as the search without stages took; their sub-meshes are solved
    without a memory limit, so where none of them fits, every number of groups is planned under it.
    """
    if _why_not(query):
        return None
    if not query.search.compares_all_pipelines:
        compared = compare_pipelines(query, math.inf, None, spent_seconds)
        try:
            pipeline = write_compared(query, compared)
        except (ConfigurationError, InfeasibleError) as error:
            log.info(f"no pipeline: {error}")
        else:
            if pipeline is not None:
                notes = (*pipeline.notes, *what_was_compared(compared))
                return replace(pipeline, notes=notes, alternatives=others_compared(compared))
        until = Deadline.after(min(LIMITS.instead_seconds, query.deadline.left()), query.deadline.stop)
        query = replace(query, deadline=until)
    pipeline, reasons = best_free_pipeline(query)
    if pipeline is None:
        log.info(f"no pipeline: {reasons}")
    return pipeline


def _why_not(query: Query) -> str:
    """Why no pipeline is looked at; empty where some are."""
    if query.recapture is None:
        return "stages take the batch in parts, and the program is given at one size only"
    if not any(output.role == "loss" for output in query.program.outputs):
        return "stages take the batch in parts, and the model returns no loss to add up"
    if least_state_bytes(query.state_bytes, query) > query.budget_bytes:
        return "stages do not help: parameters and their states alone are too large"
    return ""


def _is_worth_a_look(query: Query, plan: Plan) -> bool:
    memory_binds = plan.micro_batches > 1 or any(operator.recompute for operator in plan.operators.values())
    return query.cluster.num_nodes > 1 or memory_binds


def best_free_pipeline(query: Query) -> tuple[Plan | None, str]:
    """(the best pipeline over all numbers of groups or None, why not more of them). query: of the whole batch."""
    best: Plan | None = None
    reasons: dict[str, None] = {}
    for groups in _group_counts(query):
        try:
            plan = plan_pipeline(query, PipelineWish(num_groups=groups, dims={}))
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
            alternatives=(_without_stages(plan), *pipeline.alternatives, *plan.alternatives),
            notes=(*pipeline.notes, other),
        )
    return replace(
        plan, notes=(*plan.notes, f"the best pipeline (pp={pipeline.mesh.shape[0]}) is predicted at {steps[1]}")
    )


def _without_stages(plan: Plan) -> Baseline:
    return Baseline(
        name="without stages",
        dims=dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
        objective_seconds=plan.objective_seconds,
        bound_seconds=plan.bound_seconds,
        predicted=plan.predicted,
    )


def _group_counts(query: Query) -> list[int]:
    """Numbers of groups that cut the cluster evenly, at nodes or inside them."""
    found = []
    for groups in range(2, min(query.cluster.num_devices, LIMITS.all_groups) + 1):
        try:
            sub_cluster(query.cluster, groups)
        except ConfigurationError:
            continue
        found.append(groups)
    return found
