"""Hidden in stages: how the collectives of a chosen pipeline are issued, and what of them computation then hides.

    stage 1, one by one     F 3.1 ms, B 6.4 ms, last B with its sums 9.0 ms
    4 MB, 2 chunks          F 2.6 ms, B 5.5 ms, last B with its sums 6.8 ms         ->  0.5 ms of F, 0.9 of B, 1.3 once

Block tables price collectives one behind the other. Of a pipeline that was chosen by them the stages that differ are
lowered, and `bucket_sizes.issues` plays their passes with every way to issue them, the last pass of backward with the
sums that are in it. The way that makes all passes of a step shortest, and fits, is the plan's; what it hides is taken
off the seconds of the stages, and the schedule is played again. So the objective of a plan counts collectives one by
one, as its bound does, and its predicted step does not.

Restricted: equal rank groups. Sums that run on behind a rank's passes count as behind them, also where those of
another stage of the rank would hide them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from torch import fx

from autopar.cost_models.schedule_player import play_pipeline
from autopar.cost_models.simulator import Timeline
from autopar.cost_models.stage_costs import StageCosts
from autopar.graphs.live_ranges import bytes_over_time, stage_memory_events
from autopar.passes.lowering.chain import cut_passes, last_one_by_one, lowered_on, resumed, start_early
from autopar.passes.lowering.stage import LoweredStage
from autopar.planner.one_mesh.bucket_sizes import CHUNKS, Issue, issues
from autopar.planner.one_mesh.query import Query
from autopar.planner.pipelines.choose_pipeline import Pipeline
from autopar.plans.busiest_rank import busiest_place
from autopar.plans.parallel_plan import Plan
from autopar.program import returned_values

Runs = dict[str, tuple[str, fx.GraphModule, int]]
"""Pass, or "last" -> (phase, its graph without early starts, how often the stages that are alike run it)."""


def with_issue(query: Query, plan: Plan, pipeline: Pipeline) -> tuple[Plan, Pipeline]:
    """The plan with how its collectives are issued, and the pipeline as it is then played. query: of one micro-batch on
    the sub-mesh; plan: of all stages, which stand on equal rank groups."""
    micro, alike = query.micro, _alike(pipeline.costs.stages)
    if micro is None or plan.layout_mesh.size == 1:
        return plan, pipeline
    place = busiest_place(plan, plan.layout_mesh, query.program)
    groups = sorted({pipeline.costs.schedule.holders[stage][0] for stage in alike})
    step = lowered_on(micro, plan, [plan.rank_groups[group].first_rank + place for group in groups], until=cut_passes)
    stages = {stage.number: stage for stage in step.stages if stage.number in alike}
    runs = {number: _runs(stage, pipeline, len(alike[number])) for number, stage in stages.items()}
    chunks = () if query.cluster.device.kind == "cpu" else CHUNKS  # as in `choose_issue`
    *early, one_by_one = issues(
        [run for own in runs.values() for run in own.values()], cluster=query.cluster, mesh=plan.layout_mesh,
        backend=plan.kernel_backend, chunks=chunks, symmetric=False,
    )  # fmt: skip
    before = _by_stage(one_by_one, runs)
    for issue in early:
        issued = replace(issue.of_plan(plan), copy_ahead_bytes=plan.copy_ahead_bytes)
        after, started = _by_stage(issue, runs), resumed(step, issued, until=start_early)
        more = {stage.number: _more_bytes(stages[stage.number], stage) for stage in started.stages
                if stage.number in alike}  # fmt: skip
        costs = list(pipeline.costs.stages)
        for number, numbers in alike.items():
            for one in numbers:
                costs[one] = _hidden(costs[one], before[number], after[number], more[number])
        played = _played(pipeline, costs)
        if played.fits and played.step_seconds <= pipeline.step_seconds:
            return issued, played
    return replace(plan, bucket_bytes=None, product_chunks={}), pipeline


def _alike(stages: Sequence[StageCosts]) -> dict[int, list[int]]:
    """The first of the stages that cost the same -> all of them."""
    found: dict[tuple[str, ...], list[int]] = {}
    for number, stage in enumerate(stages):
        costs = (getattr(stage, each.name) for each in fields(stage))
        found.setdefault(tuple("" if cost is None else f"{cost:.6g}" for cost in costs), []).append(number)
    return {numbers[0]: numbers for numbers in found.values()}


def _runs(stage: LoweredStage, pipeline: Pipeline, count: int) -> Runs:
    parts, halves = stage.partition, stage.halves
    times = count * pipeline.micro_batches
    runs: Runs = {"F": ("forward", parts.forward, times)}
    kinds = pipeline.costs.schedule.kinds(stage.number)
    if halves is None:
        return runs
    if "I" in kinds:
        runs |= {"I": ("backward", halves.inputs, times), "W": ("backward", halves.weights, times)}
    else:
        runs["B"] = ("backward", halves.whole, times)
    last = last_one_by_one(stage)
    if last is not None:
        runs["last"] = ("backward", last, count)
    elif stage.late is not None:
        runs["late"] = ("backward", stage.late.reduce, count)
    return runs


@dataclass(frozen=True, slots=True)
class _Length:
    """Seconds of a pass: of what it computes, beside collectives, and up to the end of these."""

    kernels: float
    whole: float

    @staticmethod
    def of(timeline: Timeline) -> _Length:
        kernels = [end for action, (_, end) in zip(timeline.actions, timeline.intervals, strict=True)
                   if action.seconds and not action.communication]  # fmt: skip
        return _Length(max(kernels, default=0.0), timeline.makespan_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _More:
    """Bytes that passes take beyond those of passes whose collectives run one by one."""

    forward: float
    backward: float


def _by_stage(issue: Issue, runs: Mapping[int, Runs]) -> dict[int, dict[str, _Length]]:
    """Stage -> its passes."""
    played = iter(issue.passes)
    return {number: {name: _Length.of(next(played)) for name in own} for number, own in runs.items()}


def _hidden(stage: StageCosts, before: Mapping[str, _Length], after: Mapping[str, _Length], more: _More) -> StageCosts:
    """The stage without what its passes hide."""
    hidden = {name: before[name].whole - after[name].whole for name in before}
    backward, weights = hidden.get("I", hidden.get("B", 0.0)), hidden.get("W", 0.0)
    from_weights = min(weights + max(0.0, backward - stage.backward_seconds), stage.weight_seconds)
    longer, once = 0.0, hidden.get("late", 0.0)
    if "last" in before:
        every = "W" if "W" in before else "B"
        longer = max(0.0, after["last"].kernels - after[every].whole)
        sums = before["last"].whole - before[every].whole
        once = sums - (after["last"].whole - after[every].whole - longer)
    return replace(
        stage,
        forward_seconds=max(0.0, stage.forward_seconds - hidden["F"]),
        backward_seconds=max(0.0, stage.backward_seconds - backward),
        weight_seconds=stage.weight_seconds - from_weights,
        last_seconds=longer,
        once_seconds=max(0.0, stage.once_seconds - once),
        forward_extra_bytes=stage.forward_extra_bytes + more.forward,
        backward_extra_bytes=stage.backward_extra_bytes + more.backward,
        whole_extra_bytes=None if stage.whole_extra_bytes is None else stage.whole_extra_bytes + more.backward,
    )


def _played(pipeline: Pipeline, stages: Sequence[StageCosts]) -> Pipeline:
    """The same schedule with other seconds."""
    schedule = pipeline.costs.schedule
    borders = pipeline.table.borders([stage.end for stage in pipeline.cut.stages[:-1]], schedule.route(0))
    costs = play_pipeline(stages, schedule, send_seconds=borders.seconds, near=borders.near)
    return replace(pipeline, costs=costs)


def _more_bytes(before: LoweredStage, after: LoweredStage) -> _More:
    peaks = [_peaks(stage) for stage in (before, after)]
    forward, backward = (max(0.0, late - early) for early, late in zip(*peaks, strict=True))
    return _More(forward=forward, backward=backward)


def _peaks(stage: LoweredStage) -> tuple[float, float]:
    """(forward, backward) the most bytes that a pass holds at once, backward whole and in halves."""
    parts, halves, turn = stage.partition, stage.halves, len(stage.partition.forward.graph.nodes) - 1
    ranges = [stage_memory_events(parts)]
    if halves is not None:
        kept = returned_values(halves.inputs.graph)[stage.sent :]
        ranges.append(stage_memory_events(replace(parts, backward=halves.inputs), halves.weights, kept))
    live = [bytes_over_time(each) for each in ranges]
    return float(np.max(live[0][:turn], initial=0)), float(max(np.max(each[turn:], initial=0) for each in live))
