"""Pipelines that nobody asked for: compared with the plan without stages where the question leaves both open.

    several nodes, neither mesh= nor dims=     a few, for a share of the time so far (`compared_pipelines.py`)
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
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from autopar.errors import ConfigurationError, InfeasibleError
from autopar.hardware.rank_groups import sub_cluster
from autopar.planner.meshes.baseline_plans import KnownPlans
from autopar.planner.meshes.choose_mesh import Chosen
from autopar.planner.meshes.contenders import Plain, Work
from autopar.planner.meshes.least_memory import least_state_bytes
from autopar.planner.one_mesh.query import Query
from autopar.planner.pipelines.compared_pipelines import (
    Compared,
    compare_pipelines,
    what_was_compared,
    write_compared,
)
from autopar.planner.pipelines.pipeline_estimates import PipelineEstimate, PipelineTraffic, estimates, look_faster
from autopar.planner.pipelines.plan_pipeline import plan_pipeline
from autopar.planner.problem.limits import LIMITS
from autopar.planner.solver.deadline import Deadline
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_seconds
from autopar.plans.plan_value import Baseline, Prediction
from autopar.request.pipeline_request import PipelineRequest

log = logging.getLogger(__name__)


class FreePipelines:
    """The `Contender` of a search without stages: pipelines, compared once, by whoever asks first and where they look
    worth it. query: of the whole batch; known: the baselines for it; began: CPU seconds of the process when the
    search began, of which pipelines take a share (but for mode="max").

    estimate of the best  baseline, played     pipelines
    7.0 s                -                     compared: far below a step without stages, 16 s
    1.16 s               1.03 s                not compared: their micro-batches would have to be captured
    25.0 s               -                     405 B parameters on 512 nodes: compared, 25.2 s without a limit

    The estimate (`pipeline_estimates.py`) takes perfect work, and on H100 clusters pipelines were played 1.4 to 2.4
    times as long as estimated; but it is no bound. Where a model fills more than a node, it is enough that they look
    faster."""

    def __init__(self, query: Query, known: KnownPlans, began: float) -> None:
        self._query, self._known, self._began = query, known, began
        self._compared: Compared | None = None
        self._is_settled = False

    @property
    def is_settled(self) -> bool:
        """Whether pipelines were compared, or why not is known."""
        return self._is_settled

    @property
    def step_seconds(self) -> float:
        """Of the best pipeline that was compared so far; infinity where there is none."""
        return math.inf if self._compared is None else self._compared.step_seconds

    @property
    def played(self) -> Prediction | None:
        """As of a `Contender`: each of them has stages."""
        return None

    def step_before(self, work: Work, plain: Plain | None) -> float:
        """As of a `Contender`."""
        if plain is None:
            return self.step_seconds
        if self._is_spared(work, plain):
            return math.inf
        seconds = self._compared_seconds(plain)
        self._is_settled = self._is_settled or work != "finer meshes" or math.isfinite(seconds)
        return seconds

    def _is_spared(self, work: Work, plain: Plain) -> bool:
        """Whether the comparison would take time and probably change nothing: before meshes of more axes where no
        pipeline looks faster than the best of the others; before other work where, besides, what was played without
        stages, or else a baseline, is faster than the best estimate."""
        query = self._query
        if work == "finer meshes":
            if query.search.compares_all_pipelines or query.cluster.num_nodes == 1 or _why_not(query):
                return True
            return not look_faster(query, self._traffic, self._estimates, plain.seconds)
        if self._is_settled or query.search.compares_all_pipelines:
            return False
        if look_faster(query, self._traffic, self._estimates, plain.seconds):
            return False
        return (plain.is_played and self._estimate >= plain.seconds) or self._estimate >= self._known.step_seconds

    def _compared_seconds(self, plain: Plain) -> float:
        query = self._query
        if query.search.compares_all_pipelines or _why_not(query):
            return math.inf
        if self._compared is None:
            spent = time.process_time() - self._began
            self._compared = compare_pipelines(query, plain.seconds, plain.work_seconds, spent)
        return self._compared.step_seconds

    @cached_property
    def _traffic(self) -> PipelineTraffic:
        return PipelineTraffic.of(self._query)

    @cached_property
    def _estimates(self) -> Sequence[PipelineEstimate]:
        return estimates(self._query, self._traffic)

    @property
    def _estimate(self) -> float:
        """Seconds of the most promising pipeline; infinity where none can be made."""
        return self._estimates[0].seconds if self._estimates else math.inf

    def better_of(self, plan: Plan) -> Plan:
        """The plan, or a pipeline that is predicted to be faster, with notes on the other; the plan where pipelines
        were spared and it is faster than the best estimate."""
        is_open = not self._is_settled and not self._query.search.compares_all_pipelines
        if is_open and self._estimate >= plan.predicted.step_seconds:
            return _with_estimate(plan, self._estimate, self._query)
        return self._better_of(plan)

    def _better_of(self, plan: Plan) -> Plan:
        query = self._query
        reason = _why_not(query)
        if query.search.compares_all_pipelines:
            pipeline, reason = (None, reason) if reason else best_free_pipeline(query)
            return better_by_prediction(plan, pipeline, reason)
        if reason or (self._compared is None and not _is_worth_a_look(query, plan)):
            return plan
        step = self._compared_seconds(Plain.of(plan))
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
        if self._compared is None:
            return None
        try:
            return write_compared(self._query, self._compared)
        except (ConfigurationError, InfeasibleError) as error:
            notes.append(f"no pipeline: {error}")
            return None


def _with_estimate(plan: Plan, estimate: float, query: Query) -> Plan:
    """The plan, with a note on pipelines that were not compared, where there might be some."""
    if math.isinf(estimate) or query.cluster.num_nodes == 1:
        return plan
    note = f"no pipeline was compared: the best one is guessed at {format_seconds(estimate)}, more than the plan takes"
    return replace(plan, notes=(*plan.notes, note))


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
                return replace(pipeline, notes=notes)
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
    if query.program.guards:
        return f"stages take the batch in parts, and {query.program.guards[0].place} reads a value of all of it"
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
            plan = plan_pipeline(query, PipelineRequest(num_groups=groups, dims={}))
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
