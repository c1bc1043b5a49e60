"""The plan of a pipeline, and of each of its stages.

    plan = with_pipeline(plan_on_submesh, ("layers.1/add#1",), "1f1b", micro_batches=4)     # two stages

The layouts of one sub-mesh hold for every stage, each on its own ranks. A value that crosses to another stage travels
in the layout in which its operator leaves it; a partial sum is reduced first, to what its first reader asks for, unless
a reader goes on with partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autopar.layout import Layout, Mesh, Partial
from autopar.parallel_plan import PIPELINE_AXIS, PipelinePlan, Plan, StagePlan, check_pipeline
from autopar.passes.local_values import is_getitem
from autopar.passes.stages import StagePrograms
from autopar.rules.engine import tensor_operands
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

    cuts: the forward operators that end the stages but the last. The stages stand where the schedule places them
    (of two places, where it takes micro-batch 0), so there are a multiple of `chunks` (zb-v: 2). fingerprint: of the program of one micro-batch, where the plan has not
    been made for it. Raises ConfigurationError for what does not fit together.
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


def stage_plan(plan: Plan, stages: StagePrograms) -> Plan:
    """The plan by which every stage is lowered on its own ranks: layouts of what crosses, and no "pp"."""
    crossing = {c.name: _crossing_layout(c.node, plan) for c in stages.crossings}
    return replace(
        plan,
        mesh=plan.layout_mesh,
        pipeline=None,
        inputs={**plan.inputs, **crossing},
        outputs={**plan.outputs, **crossing},
    )


def _crossing_layout(node: fx.Node, plan: Plan) -> Layout:
    source, index = (node.args[0], node.args[1]) if is_getitem(node) else (node, 0)
    assert isinstance(source, fx.Node)
    assert isinstance(index, int)
    layout = plan.operators[source.meta["operator"]].outputs[index]
    if not _is_partial(layout):
        return layout
    wishes = [wish for reader in node.users for wish in _wishes(reader, node, plan)]
    if not wishes or any(wish is None or _is_partial(wish) for wish in wishes):
        return layout  # a reader goes on with the partial sums, or looks at them through a view
    return next(wish for wish in wishes if wish is not None)


def _wishes(reader: fx.Node, node: fx.Node, plan: Plan) -> list[Layout | None]:
    """The layouts in which an operator reads `node`; None where it is no operator of the plan."""
    entry = plan.operators.get(str(reader.meta.get("operator")))
    if entry is None:
        return [None]
    pairs = zip(tensor_operands(reader), entry.inputs, strict=True)
    return [wanted for operand, wanted in pairs if operand is node]


def _is_partial(layout: Layout) -> bool:
    return any(isinstance(placement, Partial) for placement in layout)
