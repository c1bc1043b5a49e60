"""The plan of a pipeline, and of each of its stages.

    plan = with_pipeline(plan_on_submesh, ("layers.1/add#1",), "1f1b", micro_batches=4)     # two stages

Where rank groups are equal, the layouts of one sub-mesh hold for every stage, each on its own ranks. A value that
crosses to another stage travels in the layout in which its operator leaves it; a partial sum is reduced first, to what
its first reader asks for, unless a reader goes on with partial sums. Unequal groups have layouts of their own, at both
ends of what crosses; partial sums are complete before they leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autopar.graphs.node_values import is_getitem
from autopar.layouts.placement import Layout, Mesh, Partial, Replicate, replicated
from autopar.passes.stages.cut_stages import Crossing, StagePrograms
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_entries import check_pipeline
from autopar.plans.plan_value import PIPELINE_AXIS, PipelinePlan, StagePlan
from autopar.rules.engine import tensor_operands
from autopar.schedules.actions import Schedule
from autopar.schedules.list_scheduler import build_schedule


def with_pipeline(
    plan: Plan,
    cuts: Sequence[str],
    schedule: str,
    micro_batches: int,
    *,
    chunks: int = 1,
    fingerprint: str | None = None,
) -> Plan:
    """`plan`, of one micro-batch on the mesh of one stage, for every stage of a pipeline.

    cuts: the forward operators that end the stages but the last. The stages stand where the schedule places them (of
    two places, where it takes micro-batch 0), so there are a multiple of `chunks` (zb-v: 2). fingerprint: of the
    program of one micro-batch, where the plan has not been made for it. Raises ConfigurationError for what does not fit
    together.
    """
    num_stages = len(cuts) + 1
    groups = build_schedule(schedule, num_stages // chunks, micro_batches, chunks).route(0)
    ends: list[str | None] = [*cuts, None]
    stages = tuple(
        StagePlan(name=f"stage {index}", last_operator=end, rank_group=group)
        for index, (end, group) in enumerate(zip(ends, groups, strict=True))
    )
    pipeline = PipelinePlan(schedule=schedule, chunks=chunks, stages=stages)
    mesh = Mesh((PIPELINE_AXIS, *plan.mesh.axis_names), (num_stages // chunks, *plan.mesh.shape))
    whole = replace(
        plan,
        mesh=mesh,
        pipeline=pipeline,
        micro_batches=micro_batches,
        fingerprint=fingerprint or plan.fingerprint,
    )
    check_pipeline(whole, pipeline)
    return whole


def stage_plan(plan: Plan, stages: StagePrograms, schedule: Schedule, group: int) -> Plan:
    """The plan by which a rank group lowers its stages: its own layouts, those of what crosses, and no "pp"."""
    own = plan.on_group(group)
    crossing = crossing_layouts(plan, stages, schedule, group)
    return replace(own, inputs={**own.inputs, **crossing}, outputs={**own.outputs, **crossing})


def crossing_layouts(plan: Plan, stages: StagePrograms, schedule: Schedule, group: int) -> dict[str, Layout]:
    """The layouts of what crosses on one rank group: what it sends as its operator leaves it, what it receives too
    where the groups are equal, else as the reader asks for it."""
    own = plan.on_group(group)
    if not plan.staged.groups:
        return {c.name: _crossing_layout(c.node, own) for c in stages.crossings}
    holder, found = schedule.rank_of_stage, dict[str, Layout]()
    for crossing in stages.crossings:
        if holder[crossing.source] == group:
            found[crossing.name] = tuple(
                Replicate() if isinstance(placement, Partial) else placement
                for placement in _left_as(crossing.node, own)
            )
        elif holder[crossing.target] == group:
            found.setdefault(crossing.name, _asked_for(crossing, own))
    return found


def _asked_for(crossing: Crossing, own: Plan) -> Layout:
    """The layout that the first reader on these ranks asks for; whole on each where that is a view or a partial sum."""
    layouts = [layout for reader in crossing.readers for layout in _wanted_layouts(reader, crossing.node, own)]
    first = layouts[0] if layouts else None
    return replicated(len(own.mesh.shape)) if first is None or _is_partial(first) else first


def _left_as(node: fx.Node, plan: Plan) -> Layout:
    """The layout in which the operator of a value leaves it."""
    source, index = (node.args[0], node.args[1]) if is_getitem(node) else (node, 0)
    assert isinstance(source, fx.Node)
    assert isinstance(index, int)
    return plan.operators[source.meta["operator"]].outputs[index]


def _crossing_layout(node: fx.Node, plan: Plan) -> Layout:
    layout = _left_as(node, plan)
    if not _is_partial(layout):
        return layout
    layouts = [layout for reader in node.users for layout in _wanted_layouts(reader, node, plan)]
    if not layouts or any(layout is None or _is_partial(layout) for layout in layouts):
        return layout  # a reader goes on with the partial sums, or looks at them through a view
    return next(layout for layout in layouts if layout is not None)


def _wanted_layouts(reader: fx.Node, node: fx.Node, plan: Plan) -> list[Layout | None]:
    """The layouts in which an operator reads `node`; None where it is no operator of the plan."""
    entry = plan.operators.get(str(reader.meta.get("operator")))
    if entry is None:
        return [None]
    pairs = zip(tensor_operands(reader), entry.inputs, strict=True)
    return [wanted for operand, wanted in pairs if operand is node]


def _is_partial(layout: Layout) -> bool:
    return any(isinstance(placement, Partial) for placement in layout)
