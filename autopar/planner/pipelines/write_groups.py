"""Write the plan of stages on unequal rank groups: every group has the layouts of its own sub-mesh's plan.

    stage 0 on ("inner",) (1,), stage 1 on ("outer", "inner") (2, 2)    -->    axes "pp", "outer", "inner"; groups of
                                                                              shapes (1, 1) and (2, 2)

The axes are those of the sub-mesh with the most; the others get axes of one device in front. An operator, a parameter
and an input take the layouts of the stage that runs or reads them first; where another stage has it too, and otherwise,
the group of that stage says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from autopar.errors import InfeasibleError
from autopar.layouts.placement import Layout, Mesh, Replicate
from autopar.passes.stages.place_stages import PlacedProgram, place_stages
from autopar.planner.memory.recomputation import DROPPED, RECOMPUTED, SAVED, expand, with_states
from autopar.planner.one_mesh.mesh_plan import plan_of
from autopar.planner.pipelines.block_table import RECOMPUTE_OF
from autopar.planner.pipelines.solved_submeshes import SubMesh
from autopar.planner.pipelines.unequal_groups import Unequal
from autopar.planner.pipelines.write_pipeline import cuts_of, prediction, stage_name, stage_plans, statistics
from autopar.planner.solver import evaluate, is_forbidden
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_entries import check_pipeline
from autopar.plans.plan_text import format_bytes, format_seconds
from autopar.plans.plan_value import PIPELINE_AXIS, OperatorPlan, ParameterPlan, PipelinePlan, RankGroup
from autopar.request.constraints import Recompute
from autopar.schedules.list_scheduler import TIMED_FAMILIES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The plan of one micro-batch on a group's sub-mesh, with the axes of the whole."""

    plan: Plan
    shape: tuple[int, ...]


def unequal_plan(found: Unequal, bound_seconds: float, cluster: str) -> Plan:
    """The plan of a pipeline on unequal groups. bound_seconds: no pipeline that was compared takes less.

    Raises InfeasibleError where stages cannot recompute each in its own way, and PlanMismatchError where the program
    cannot be cut so.
    """
    pipeline, subs = found.pipeline, found.subs
    axes = max((sub.solved.mesh.axis_names for sub in subs), key=len)
    made: dict[int, _Group] = {}
    for sub in subs:
        if id(sub) not in made:
            made[id(sub)] = _group(found, sub, len(axes))
    groups = [made[id(sub)] for sub in subs]
    runs = subs[0].runs
    placed = place_stages(subs[0].query.program, cuts_of(runs, pipeline))
    base = _merged(placed, groups)
    shapes = [group.shape for group in groups]
    box = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    stages = PipelinePlan(
        schedule=pipeline.family,
        chunks=1,
        stages=stage_plans(runs, pipeline),
        actions=tuple(str(pipeline.costs.schedule).splitlines()) if pipeline.family in TIMED_FAMILIES else (),
        groups=tuple(
            _rank_group(base, placed, stage, group, first)
            for stage, (group, first) in enumerate(zip(groups, found.first_ranks, strict=True))
        ),
    )
    step = pipeline.step_seconds
    whole = replace(
        base,
        mesh=Mesh((PIPELINE_AXIS, *axes), (len(groups), *box)),
        pipeline=stages,
        cluster=cluster,
        micro_batches=pipeline.micro_batches,
        bucket_bytes=None,  # priced one by one: `hidden_in_stages.py`
        predicted=prediction(pipeline),
        objective_seconds=step,
        bound_seconds=min(bound_seconds, step),
        gap=1.0 - min(bound_seconds, step) / step,
        statistics={**base.statistics, **statistics(pipeline)},
        notes=(*base.notes, *_notes(found)),
    )
    check_pipeline(whole, stages)
    return whole


def _group(found: Unequal, sub: SubMesh, num_axes: int) -> _Group:
    """The plan on one sub-mesh, recomputing as its stages do."""
    solved = sub.solved
    built, labels = solved.built, solved.labels
    by_operator: dict[fx.Node, Recompute] = {}
    for stage, other in zip(found.pipeline.cut.stages, found.subs, strict=True):
        if other is sub and sub.table.modes[stage.mode] != "none":
            mode = RECOMPUTE_OF[sub.table.modes[stage.mode]]
            for node in solved.lifetimes.in_order:
                if node.meta["phase"] != "backward" and stage.first <= sub.runs.of(solved.lifetimes, node) < stage.end:
                    by_operator[node] = mode
    if by_operator:
        built = expand(solved.built, solved.lifetimes, "none", by_operator)
        labels = with_states(solved.built, built, solved.labels, (RECOMPUTED, SAVED, DROPPED))
        cost, _ = evaluate(built.problem, labels)
        if is_forbidden(np.array(cost)):
            raise InfeasibleError('stages of this model cannot recompute each in its own way; pass recompute="none"')
    solution = replace(sub.solution, assignment=labels, objective=evaluate(built.problem, labels)[0])
    plan = plan_of(sub.query, solved.mesh, built, solution, solved.lifetimes)
    missing = num_axes - len(solved.mesh.shape)
    return _Group(plan=_padded(plan, missing), shape=(*(1,) * missing, *solved.mesh.shape))


def _padded(plan: Plan, missing: int) -> Plan:
    """The same plan with so many axes of one device in front."""

    def layout(old: Layout) -> Layout:
        return (*(Replicate(),) * missing, *old)

    def maybe(old: Layout | None) -> Layout | None:
        return None if old is None else layout(old)

    def operator(old: OperatorPlan) -> OperatorPlan:
        return replace(
            old,
            axes=(*(None,) * missing, *old.axes),
            inputs=tuple(map(layout, old.inputs)),
            outputs=tuple(map(layout, old.outputs)),
            shared_forward=tuple(map(maybe, old.shared_forward)),
            shared_backward=tuple(map(maybe, old.shared_backward)),
        )

    def parameter(old: ParameterPlan) -> ParameterPlan:
        return replace(
            old,
            stored=layout(old.stored),
            used=layout(old.used),
            gradient=layout(old.gradient),
            shared_forward=maybe(old.shared_forward),
            shared_backward=maybe(old.shared_backward),
        )

    def data(old: Mapping[str, Layout]) -> dict[str, Layout]:
        return {name: layout(found) for name, found in old.items()}

    return replace(
        plan,
        parameters={name: parameter(old) for name, old in plan.parameters.items()},
        operators={name: operator(old) for name, old in plan.operators.items()},
        inputs=data(plan.inputs),
        buffers=data(plan.buffers),
        outputs=data(plan.outputs),
    )


def _merged(placed: PlacedProgram, groups: list[_Group]) -> Plan:
    """What each operator, parameter and output is on the stage that has it first."""
    plans = [group.plan for group in groups]
    homes = _homes(placed)
    return replace(
        plans[0],
        operators={name: plans[homes.get(name, 0)].operators[name] for name in plans[0].operators},
        parameters={name: plans[min(placed.holders.get(name) or {0})].parameters[name] for name in plans[0].parameters},
        outputs=plans[-1].outputs,
    )


def _rank_group(base: Plan, placed: PlacedProgram, stage: int, group: _Group, first_rank: int) -> RankGroup:
    plan, homes = group.plan, _homes(placed)
    mine = {name for name, holders in placed.holders.items() if stage in holders}
    return RankGroup(
        first_rank=first_rank,
        shape=group.shape,
        operators={n: o for n, o in plan.operators.items() if n not in homes and o != base.operators[n]},
        parameters={n: p for n, p in plan.parameters.items() if n in mine and p != base.parameters[n]},
        inputs={n: layout for n, layout in plan.inputs.items() if layout != base.inputs[n]},
        buffers={n: layout for n, layout in plan.buffers.items() if layout != base.buffers[n]},
        outputs={n: layout for n, layout in plan.outputs.items() if layout != base.outputs[n]},
    )


def _homes(placed: PlacedProgram) -> dict[str, int]:
    return {str(n.meta["operator"]): stage for n, stage in placed.homes.items() if n.op == "call_function"}


def _notes(found: Unequal) -> list[str]:
    """What every stage is, where it stands, and what it costs."""
    pipeline, costs = found.pipeline, found.pipeline.costs
    kinds = [sub.query.cluster.device.name for sub in found.subs]
    lines = [
        f"pipeline: {len(found.subs)} stages on groups of {', '.join(str(s.table.devices) for s in found.subs)} "
        f"devices, {pipeline.family}, {pipeline.micro_batches} micro-batches, bubble {costs.bubble_rate:.1%}"
    ]
    for number, (sub, choice, stage) in enumerate(zip(found.subs, pipeline.cut.stages, costs.stages, strict=True)):
        mode, first = sub.table.modes[choice.mode], found.first_ranks[number]
        kind = f" ({kinds[number]})" if len(set(kinds)) > 1 else ""
        lines.append(
            f"stage {number} on ranks {first} .. {first + sub.table.devices - 1}{kind} as {sub.table.name} "
            f"({stage_name(sub.runs, choice.first, choice.end)}): forward {format_seconds(stage.forward_seconds)}, "
            f"backward {format_seconds(stage.backward_seconds)} + weights {format_seconds(stage.weight_seconds)}, "
            f"keeps {format_bytes(stage.saved_bytes)} per micro-batch"
            + ("" if mode == "none" else f", recomputes: {mode}")
            + f", peak {format_bytes(costs.peak_bytes[number])}"
        )
    if len(set(kinds)) > 1:
        lines.append(_shares(found, kinds))
    lines.append(
        "stages on unequal groups: the cut is the best of sum t + (m - 1) max t over all contiguous ones on the "
        "sub-meshes that were solved; values that go to a group of another shape are priced in their sender's layout"
    )
    return lines


def _shares(found: Unequal, kinds: Sequence[str]) -> str:
    """Which kind of device runs which stages, and how much of the model."""
    words = []
    for kind in dict.fromkeys(kinds):
        own = [number for number, other in enumerate(kinds) if other == kind]
        blocks = sum(found.pipeline.cut.stages[n].end - found.pipeline.cut.stages[n].first for n in own)
        stages = f"stage{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}"
        words.append(f"{kind} {stages} ({blocks} of {found.subs[0].table.num_blocks} pieces of the model)")
    return f"kinds of devices: {'; '.join(words)}"
