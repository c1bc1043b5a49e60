"""Write the plan of a chosen pipeline: the layouts of one sub-mesh, stages, schedule, and what each stage holds.

    stage 0 on group 0 (embedding .. layers.1): forward 1.2 ms, backward 2.5 ms + weights 1.1 ms
    stages 1 to 12 (layers.2 .. layers.25), each: forward 1.1 ms, backward 1.4 ms + weights 1.1 ms, recomputes: full
    bubble 12.1 %: of the longest rank's step, the part in which ranks do not compute

Step, bubble and peaks are those of the schedule as it is played with collectives beside computation
(`hidden_in_stages.py`). Objective and bound of such a plan: the simulated step with collectives one by one, and what no
pipeline of these block tables is under (`pipeline_bound.py`); layouts of the sub-mesh have a bound of their
own, which a note states.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from autopar.cost_models.stage_costs import StageCosts
from autopar.errors import ConfigurationError, InfeasibleError, PlanMismatchError
from autopar.passes.stages.cut_stages import cut_stages
from autopar.planner.memory.recomputation import expand, with_states
from autopar.planner.one_mesh.mesh_plan import plan_of
from autopar.planner.one_mesh.query import Query
from autopar.planner.pipelines.block_costs import AGAIN_FIRST, ON_HOST_FIRST, Labels, Solved
from autopar.planner.pipelines.block_table import HOST_MODES, RECOMPUTE_OF
from autopar.planner.pipelines.choose_pipeline import Pipeline
from autopar.planner.pipelines.hidden_in_stages import with_issue
from autopar.planner.pipelines.runs import THROUGH, Runs
from autopar.planner.pipelines.stage_search import StageChoice
from autopar.planner.pipelines.submesh import whole_mesh
from autopar.planner.problem.build import Built
from autopar.planner.solver import Solution, evaluate, is_forbidden
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_entries import check_pipeline
from autopar.plans.plan_text import format_bytes, format_seconds
from autopar.plans.plan_value import PipelinePlan, Prediction, StagePlan
from autopar.plans.rung_names import ON_HOST
from autopar.request.pipeline_request import SEARCHED
from autopar.schedules.list_scheduler import TIMED_FAMILIES

FOLDED = 3
"""So many stages in a row that cost the same are one line of the notes."""
WRITTEN_OUT = TIMED_FAMILIES | {SEARCHED}
"""Schedules of which a plan holds the actions."""


def check_cut(query: Query, runs: Runs, pipeline: Pipeline) -> None:
    """Raise ConfigurationError where the runtime cannot run these stages."""
    try:
        cut_stages(query.program, cuts_of(runs, pipeline))
    except PlanMismatchError as error:
        raise ConfigurationError(f"the model cannot be cut into these stages: {error}") from error


def pipeline_plan(
    query: Query, solution: Solution, solved: Solved, runs: Runs, pipeline: Pipeline, bound_seconds: float
) -> Plan:
    """The plan of a pipeline. query: of one micro-batch on the sub-mesh, which `solution` has solved; bound_seconds: no
    pipeline that was compared takes less."""
    num_groups = len(pipeline.costs.schedule.ranks)
    built, labels = _with_recomputation(solved, runs, pipeline)
    objective, _ = evaluate(built.problem, labels)
    chosen = replace(solution, assignment=labels, objective=objective)
    plan = plan_of(query, solved.mesh, built, chosen, solved.lifetimes)
    stages = PipelinePlan(
        schedule=pipeline.family,
        chunks=pipeline.chunks,
        stages=stage_plans(runs, pipeline),
        actions=tuple(str(pipeline.costs.schedule).splitlines()) if pipeline.family in WRITTEN_OUT else (),
    )
    step = pipeline.step_seconds
    whole, played = with_issue(
        query,
        replace(
            plan,
            mesh=whole_mesh(num_groups, solved.mesh),
            pipeline=stages,
            micro_batches=pipeline.micro_batches,
            copy_ahead_bytes=pipeline.table.ahead_bytes if plan.waits_on_host else 0.0,
            objective_seconds=step,
            bound_seconds=min(bound_seconds, step),
            gap=1.0 - min(bound_seconds, step) / step,
        ),
        pipeline,
    )
    whole = replace(
        whole,
        predicted=prediction(played),
        statistics={**plan.statistics, **statistics(played)},
        notes=(*plan.notes, *_stage_notes(runs, played), *_hidden_note(pipeline, played), _bound_note(solution)),
    )
    check_pipeline(whole, stages)
    return whole


def cuts_of(runs: Runs, pipeline: Pipeline) -> tuple[str, ...]:
    """The last operator of every stage but the last."""
    return tuple(runs.last_operators[stage.end - 1] for stage in pipeline.cut.stages[:-1])


def stage_plans(runs: Runs, pipeline: Pipeline) -> tuple[StagePlan, ...]:
    """The stages as the plan writes them."""
    groups = pipeline.costs.schedule.route(0)
    ends: list[str | None] = [*cuts_of(runs, pipeline), None]
    return tuple(
        StagePlan(
            name=stage_name(runs, stage.first, stage.end),
            last_operator=end,
            rank_group=group,
            gather_once=pipeline.table.gather_once,
        )
        for stage, end, group in zip(pipeline.cut.stages, ends, groups, strict=True)
    )


def stage_name(runs: Runs, first: int, end: int) -> str:
    """The blocks of a stage by the first and the last one."""
    begin, last = runs.names[first].split(THROUGH)[0], runs.names[end - 1].split(THROUGH)[-1]
    return begin if begin == last else f"{begin}{THROUGH}{last}"


def _with_recomputation(solved: Solved, runs: Runs, pipeline: Pipeline) -> tuple[Built, Labels]:
    """The problem and labels in which every stage recomputes in its own way."""
    modes = [pipeline.table.modes[stage.mode] for stage in pipeline.cut.stages for _ in range(stage.first, stage.end)]
    by_operator = {
        node: RECOMPUTE_OF[modes[runs.of(solved.lifetimes, node)]]
        for node in solved.lifetimes.in_order
        if node.meta["phase"] != "backward"
    }
    if set(modes) == {"none"}:
        return solved.built, solved.labels
    built = expand(solved.built, solved.lifetimes, "none", by_operator)
    built = built if set(modes).isdisjoint(HOST_MODES) else solved.with_host(built)
    labels = with_states(solved.built, built, solved.labels, AGAIN_FIRST)
    waiting = with_states(solved.built, built, solved.labels, ON_HOST_FIRST)
    for node, index in built.operators.items():
        if modes[runs.of(solved.lifetimes, node)] in HOST_MODES:
            labels[index] = waiting[index]
    cost, _ = evaluate(built.problem, labels)
    if is_forbidden(np.array(cost)):
        raise InfeasibleError('stages of this model cannot recompute each in its own way; pass recompute="none"')
    return built, labels


def prediction(pipeline: Pipeline) -> Prediction:
    """What the plan promises: step, memory and communication of the played pipeline."""
    costs = pipeline.costs
    fullest = int(np.argmax(costs.peak_bytes))
    states = sum(
        stage.state_bytes
        for stage, holders in zip(costs.stages, costs.schedule.holders, strict=True)
        if fullest in holders
    )
    return Prediction(
        step_seconds=costs.step_seconds,
        peak_bytes=pipeline.peak_bytes,
        compute_seconds=max(costs.compute_seconds),
        exposed_communication_seconds=max(costs.exposed_communication_seconds),
        bytes_by_kind={
            f"states of rank group {fullest}": states,
            "activations of all micro-batches in flight": pipeline.peak_bytes - states,
        },
        bytes_by_rung={ON_HOST: pipeline.host_bytes} if pipeline.host_bytes else {},
    )


def statistics(pipeline: Pipeline) -> dict[str, float | int | str]:
    """What the plan says of its pipeline: bubble, stages, peak of each rank group."""
    return {
        "bubble": pipeline.costs.bubble_rate,
        "stages": len(pipeline.cut.stages),
        "peak_bytes_by_rank_group": ", ".join(format_bytes(size) for size in pipeline.costs.peak_bytes),
    }


def _stage_notes(runs: Runs, pipeline: Pipeline) -> list[str]:
    """What every stage is and costs, three or more in a row that cost the same in one line, and how full every rank
    group is."""
    costs = pipeline.costs
    groups = costs.schedule.route(0)
    head = (
        f"pipeline: {len(groups)} stages on {len(costs.schedule.ranks)} groups of {pipeline.table.devices} devices, "
        f"{pipeline.family}, {pipeline.micro_batches} micro-batches, bubble {costs.bubble_rate:.1%}"
    )
    chosen = pipeline.cut.stages
    words = [_costs_of(stage, pipeline, choice) for stage, choice in zip(costs.stages, chosen, strict=True)]
    lines = []
    for cost, equal in itertools.groupby(range(len(words)), key=words.__getitem__):
        numbers = list(equal)
        if len(numbers) >= FOLDED:
            name = stage_name(runs, chosen[numbers[0]].first, chosen[numbers[-1]].end)
            lines.append(f"stages {numbers[0]} to {numbers[-1]} ({name}), each: {cost}")
            continue
        for number in numbers:
            name = stage_name(runs, chosen[number].first, chosen[number].end)
            lines.append(f"stage {number} on group {groups[number]} ({name}): {cost}")
    peaks = ", ".join(format_bytes(size) for size in costs.peak_bytes)
    return [head, *lines, f"peak of each group: {peaks}"]


def _costs_of(stage: StageCosts, pipeline: Pipeline, choice: StageChoice) -> str:
    mode = pipeline.table.modes[choice.mode]
    return (
        f"forward {format_seconds(stage.forward_seconds)}, backward {format_seconds(stage.backward_seconds)} + weights "
        f"{format_seconds(stage.weight_seconds)}, keeps {format_bytes(stage.saved_bytes)} per micro-batch"
        + ("" if RECOMPUTE_OF[mode] == "none" else f", recomputes: {RECOMPUTE_OF[mode]}")
        + (f", {mode}" if mode in HOST_MODES else "")
    )


def _hidden_note(pipeline: Pipeline, played: Pipeline) -> list[str]:
    """What collectives beside computation save, where they save anything."""
    saved = pipeline.step_seconds - played.step_seconds
    if saved <= 0.0:
        return []
    return [
        f"collectives of stages run beside computation, and sums of gradients beside the last backward: step "
        f"{format_seconds(played.step_seconds)}, one by one {format_seconds(pipeline.step_seconds)}"
    ]


def _bound_note(solution: Solution) -> str:
    return (
        "objective: the simulated step, collectives one by one; bound: the work of the busiest rank behind the forward "
        "of the stages in front of it, for any cut and schedule, without transfers and memory. The cut is the best of "
        "the formula sum t + (m - 1) max t over all contiguous ones with these costs; layouts are those of the plan of "
        f"the whole model on one sub-mesh (gap {solution.gap:.1e}), also at the borders of stages"
    )
