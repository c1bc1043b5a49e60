"""Stage edits: a plan with stages changed by hand, completed, played, checked and priced again.

    {"layers.3.up.weight": {"tp": "R"}}     a layout, on the axes of the rank groups; all stages share one problem
    {"layers.3": {"pp": 1}}                 the block belongs to stage 1; what lies between follows
    {"schedule": "gpipe"}                   another family on the same stages
    {"micro_batches": 8}                    the batch in other parts, in the same layouts

Everything that the edit does not name stays: cut, recomputation of every stage, layouts, schedule. The step is played
as the planner plays it, and the peak of every rank group is checked against the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.errors import ConfigurationError, InfeasibleError
from autopar.explain.completion import completed_beside, merged
from autopar.explain.source import Source
from autopar.explain.stage_problem import StageProblem, stage_problem, without_stages
from autopar.planner.one_mesh.mesh_plan import price
from autopar.planner.one_mesh.read_solution import switching_costs
from autopar.planner.one_mesh.warm_start import Rows
from autopar.planner.pipelines.choose_pipeline import Pipeline
from autopar.planner.pipelines.pipeline_bound import least_step_seconds
from autopar.planner.pipelines.write_pipeline import check_cut, pipeline_plan
from autopar.planner.problem.constraint_targets import meshes_with_axes
from autopar.planner.solver import solution_of
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_bytes, format_seconds, matching_names
from autopar.plans.plan_value import PIPELINE_AXIS, StagePlan
from autopar.request.constraints import parse_constraints
from autopar.request.pipeline_request import SEARCHED, check_family
from autopar.schedules.list_scheduler import FAMILIES, TIMED_FAMILIES, build_schedule

SCHEDULE, MICRO_BATCHES = "schedule", "micro_batches"
BOUND_NOTE = (
    "objective: the simulated step; bound: the work of the busiest rank behind the forward of stages before it, for "
    "any cut and schedule with these layouts, without transfers and memory; cut, schedule and layouts are as given"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edit:
    """placements: as `constraints=`; moves: (pattern, stage)."""

    placements: Mapping[str, object]
    moves: tuple[tuple[str, int], ...]
    schedule: str | None
    micro_batches: int | None


def refuse_stage_changes(changes: Mapping[str, object]) -> None:
    """Raise ConfigurationError where an edit of a plan without stages speaks of stages."""
    edit = _read(changes)
    if edit.moves or edit.schedule is not None or edit.micro_batches is not None:
        raise ConfigurationError(
            "edit(schedule, micro_batches, pp) is for plans with stages, and this plan has none: ask "
            'what_if(dims={"pp": 2}) or what_if(micro_batches=...)'
        )


def edited_stages(source: Source, plan: Plan, changes: Mapping[str, object]) -> Plan:
    """The plan with `changes`, see the module docstring; without changes it is only checked and priced again.

    Raises ConfigurationError and PlanMismatchError for what cannot be meant or cannot stand side by side, and
    InfeasibleError where a rank group does not hold it.
    """
    edit = _read(changes)
    parsed = parse_constraints(dict(edit.placements))
    if parsed.recompute or parsed.no_replicated_compute:
        raise ConfigurationError(
            "edit takes placements, pp, schedule and micro_batches; recompute= and no_replicated_compute are wishes of "
            "what_if"
        )
    meshes_with_axes(parsed.placements, [plan.layout_mesh])
    wanted = _with_schedule(plan, edit)
    constraints = merged(source.request.constraints, edit.placements) if edit.placements else None
    request = replace(source.request, constraints=constraints)
    problem = stage_problem(source, wanted, request)
    labels, notes = _labels(problem, wanted, bool(edit.placements))
    solved = problem.solved(wanted, labels)
    modes = problem.modes(wanted, solved)
    wanted = _with_moves(problem, wanted, edit.moves)
    pipeline = problem.played(wanted, solved, modes)
    _check_memory(problem, wanted, pipeline)
    check_cut(problem.query, problem.runs, pipeline)
    policy = FAMILIES.get(pipeline.family)
    bound = least_step_seconds(
        pipeline.table,
        wanted.mesh.shape[0],
        wanted.micro_batches,
        one_stage_each=policy is not None and policy.chunks == (1,) and not policy.both_ways,
        both_ways=policy is not None and policy.both_ways,
    )
    found = pipeline_plan(
        problem.query, solution_of(solved.built.problem, labels, 0.0), solved, problem.runs, pipeline, bound
    )
    kept = [note for note in found.notes if not note.startswith("objective: ")]  # says how a search cut and solved
    said = f"edited by hand: step {format_seconds(found.predicted.step_seconds)}, before "
    said += format_seconds(plan.predicted.step_seconds)
    return replace(
        found,
        cluster=plan.cluster,
        profile=plan.profile,
        question=plan.question,
        baselines=plan.baselines,
        alternatives=plan.alternatives,
        explanations=switching_costs(solved.built, labels, solved.mesh),
        notes=(*kept, BOUND_NOTE, *notes, *([said] if changes else [])),
    )


def _read(changes: Mapping[str, object]) -> _Edit:
    placements: dict[str, object] = {}
    moves = []
    for pattern, value in changes.items():
        if pattern in (SCHEDULE, MICRO_BATCHES):
            continue
        if not isinstance(value, Mapping) or PIPELINE_AXIS not in value:
            placements[pattern] = value
            continue
        moves.append((pattern, _number(value[PIPELINE_AXIS], f"the stage of {pattern!r}", 0)))
        others = {axis: placement for axis, placement in value.items() if axis != PIPELINE_AXIS}
        placements |= {pattern: others} if others else {}
    schedule, count = changes.get(SCHEDULE), changes.get(MICRO_BATCHES)
    return _Edit(
        placements=placements,
        moves=tuple(moves),
        schedule=None if schedule is None else str(schedule),
        micro_batches=None if count is None else _number(count, MICRO_BATCHES, 1),
    )


def _number(value: object, what: str, least: int) -> int:
    if isinstance(value, bool) or not str(value).isdigit() or int(str(value)) < least:
        raise ConfigurationError(f"{what} is {value!r}: write a whole number of at least {least}")
    return int(str(value))


def _with_schedule(plan: Plan, edit: _Edit) -> Plan:
    """The plan under the schedule and the number of micro-batches that are asked for."""
    pipeline = plan.staged
    if edit.schedule is None and edit.micro_batches is None:
        return plan
    family, count = edit.schedule or pipeline.schedule, edit.micro_batches or plan.micro_batches
    check_family(family)
    if family == SEARCHED:
        raise ConfigurationError(
            f"a searched order is one for its {plan.micro_batches} micro-batches: name a family, "
            f'{", ".join(FAMILIES)}, or ask what_if(schedule="{SEARCHED}", micro_batches={count})'
        )
    groups, chunks = plan.mesh.shape[0], len(pipeline.stages) // plan.mesh.shape[0]
    if chunks not in FAMILIES[family].chunks:
        raise ConfigurationError(
            f"schedule {family} has {' or '.join(map(str, FAMILIES[family].chunks))} stages per rank group, the plan "
            f'{chunks}: ask what_if(schedule="{family}"), which cuts anew'
        )
    if family in TIMED_FAMILIES:
        route = tuple(stage.rank_group for stage in pipeline.stages)
    else:
        route = build_schedule(family, groups, count, chunks).route(0)
    stages = tuple(replace(stage, rank_group=group) for stage, group in zip(pipeline.stages, route, strict=True))
    changed = replace(pipeline, schedule=family, chunks=chunks, stages=stages, actions=())
    return replace(plan, pipeline=changed, micro_batches=count)


def _labels(problem: StageProblem, plan: Plan, has_placements: bool) -> tuple[Rows, list[str]]:
    """Labels that obey the edit; raises where what the plan says is no choice."""
    if not has_placements:
        return problem.recovered(plan).labels, []
    return completed_beside(price(problem.query, plan.layout_mesh), without_stages(plan))


def _with_moves(problem: StageProblem, plan: Plan, moves: tuple[tuple[str, int], ...]) -> Plan:
    """The plan with blocks moved to other stages. Raises ConfigurationError for a stage that is none or gets empty."""
    pipeline = plan.staged
    stages, ends = pipeline.stages, problem.runs.last_operators
    cuts = [ends.index(stage.last_operator or ends[-1]) + 1 for stage in stages]
    for pattern, wanted in moves:
        if wanted >= len(stages):
            raise ConfigurationError(f"{pattern!r}: stage {wanted}; the plan has the stages 0 to {len(stages) - 1}")
        for run in sorted({*_runs_of(problem, plan, pattern)}):
            cuts = [min(end, run) if stage < wanted else max(end, run + 1) for stage, end in enumerate(cuts)]
    empty = [stage for stage, (begin, end) in enumerate(zip([0, *cuts[:-1]], cuts, strict=True)) if end <= begin]
    if empty:
        raise ConfigurationError(f"stage {empty[0]} would have no block left: every stage keeps at least one")
    moved: tuple[StagePlan, ...] = tuple(
        replace(stage, last_operator=None if number == len(stages) - 1 else ends[end - 1])
        for number, (stage, end) in enumerate(zip(stages, cuts, strict=True))
    )
    return replace(plan, pipeline=replace(pipeline, stages=moved))


def _runs_of(problem: StageProblem, plan: Plan, pattern: str) -> Iterator[int]:
    """The blocks of what a pattern names. Raises ConfigurationError for what no forward operator is in."""
    names = {*matching_names(plan, pattern)}
    modules = {name.rpartition(".")[0] for name in names if name in plan.parameters}
    found = False
    for node in problem.lifetimes.in_order:
        operator = str(node.meta["operator"])
        if node.meta["phase"] != "backward" and (operator in names or operator.partition("/")[0] in modules):
            found = True
            yield problem.runs.of(problem.lifetimes, node)
    if not found:
        raise ConfigurationError(f"{pattern!r} names no forward operator: stages are runs of forward operators")


def _check_memory(problem: StageProblem, plan: Plan, pipeline: Pipeline) -> None:
    limit = problem.whole.budget_bytes
    full = max(range(len(pipeline.costs.peak_bytes)), key=pipeline.costs.peak_bytes.__getitem__)
    excess = pipeline.costs.peak_bytes[full] - limit
    if excess > 0:
        ranks = plan.rank_groups[full]
        raise InfeasibleError(
            f"the edited plan needs {format_bytes(pipeline.costs.peak_bytes[full])} on ranks {ranks.first_rank} to "
            f"{ranks.first_rank + ranks.size - 1} (rank group {full}), the limit is {format_bytes(limit)}: "
            f"{format_bytes(excess)} too much"
        )
