"""Emit the lowered stages of this rank, bound to processes and kernels, as the `Step` that runs them in parts.

Every rank has cut the whole program, so that all agree on what crosses, and has lowered its own stages only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autopar.layouts.placement import Layout, local_shape
from autopar.passes.lowering.placed_experts import as_held
from autopar.passes.lowering.stage import LoweredStage, LoweredStep
from autopar.passes.random_operators import SEED, is_random
from autopar.passes.stages.cut_stages import StagePrograms
from autopar.passes.stages.stage_plans import crossing_layouts
from autopar.plans.parallel_plan import Plan
from autopar.program import Input, Output, Program, returned_values
from autopar.runtime.consensus import gather_from_all
from autopar.runtime.parameters import StageParameters
from autopar.runtime.pipeline.parts_step import PartsStep
from autopar.runtime.pipeline.pipeline_routes import GroupLayout, SentPiece, route
from autopar.runtime.pipeline.pipeline_wires import Form, Message
from autopar.runtime.pipeline.shared_values import SharedGradients, StageResults, ranks_across
from autopar.runtime.pipeline.stage_passes import PartCalls, StageGraphs
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.bound_graphs import bind_groups, group_symbols
from autopar.schedules.actions import Schedule


def emit_parts(lowered: LoweredStep, groups: ProcessGroups) -> PartsStep:
    """The step of this rank under a plan with micro-batches or stages; all ranks call it alike."""
    plan, micro, stages, schedule = lowered.plan, lowered.micro, lowered.cut, lowered.schedule
    own, numbers = as_held(lowered.stages[0].plan, micro.program), {stage.number for stage in lowered.stages}
    graphs = [graph for stage in lowered.stages for graph in _run_graphs(stage)]
    statistics = lowered.statistics_graph
    symbols = group_symbols(*graphs, *(() if statistics is None else (statistics,)))
    groups.create({symbol for found in gather_from_all(sorted(symbols)) for symbol in found})
    held = {name for name, holders in stages.holders.items() if holders & numbers}
    layouts = [crossing_layouts(plan, stages, schedule, group) for group in range(len(groups.meshes))]
    calls = PartCalls(micro=micro, backend=plan.kernel_backend, folds=plan.shards > 0)
    return PartsStep(
        micro=micro,
        lowered=replace(micro.program, inputs=_inputs(lowered), outputs=_gradients(micro.program, held)),
        plan=plan,
        own_plan=own,
        groups=groups,
        stages=stages,
        graphs={stage.number: _bound(stage, stages, groups, calls) for stage in lowered.stages},
        statistics=None if statistics is None else (bind_groups(statistics, groups), lowered.statistic_inputs),
        calls=calls,
        schedule=schedule,
        forms=_forms(stages, layouts[groups.group], groups),
        pieces=_pieces(stages, layouts, groups),
        gradient_forms=_gradient_forms(micro.program, own, groups, held),
        shared=_shared(stages, schedule, groups, micro.program, own),
        stage_parameters=_stage_parameters(stages, schedule, held),
        results=StageResults(
            groups=groups,
            schedule=schedule,
            across=ranks_across(groups, range(len(groups.meshes))),
            owners=stages.owners,
        ),
    )


def _run_graphs(stage: LoweredStage) -> list[fx.GraphModule]:
    """The graphs whose groups the passes of a stage need; halves of backward have those of the whole."""
    found = [*stage.partition.graphs]
    found += [stage.prepared.prepare] if stage.prepared is not None else []
    return [*found, stage.late.reduce] if stage.late is not None else found


def _totals(stage: LoweredStage) -> dict[int, Form]:
    """Shape and dtype of the total of a gradient, before the sums over ranks that wait."""
    backward = stage.unreduced if stage.late is None else stage.late.unreduced
    if backward is None:
        return {}
    returned = returned_values(backward.graph)
    return {i: Form(tuple(returned[i].meta["local_shape"]), returned[i].meta["dtype"]) for i in stage.totals}


def _bound(own: LoweredStage, stages: StagePrograms, groups: ProcessGroups, calls: PartCalls) -> StageGraphs:
    parts, halves, prepared, late = own.partition, own.halves, own.prepared, own.late
    if halves is not None:
        halves = replace(
            halves, inputs=bind_groups(halves.inputs, groups), weights=bind_groups(halves.weights, groups)
        )
    names = [output.name for output in own.program.outputs if output.role in ("loss", "output")]
    gradients = tuple(output.name for output in own.program.outputs if output.role == "gradient")
    return StageGraphs(
        lowered=own.program,
        forward=bind_groups(parts.forward, groups),
        backward=None if parts.backward is None else bind_groups(parts.backward, groups),
        totals=own.totals,
        halves=halves,
        prepared=None if prepared is None else replace(prepared, prepare=bind_groups(prepared.prepare, groups)),
        late=None if late is None else replace(late, reduce=bind_groups(late.reduce, groups)),
        first=None if own.first is None else bind_groups(own.first, groups),
        last=None if own.last is None else bind_groups(own.last, groups),
        last_kind=own.context.last_kind,
        ending=None if own.ending is None else bind_groups(own.ending, groups),
        total_forms=_totals(own),
        results=tuple(name for name in names if name in stages.owners),
        sent_forward=tuple(name for name in names if name not in stages.owners),
        sent_backward=tuple(name for name in gradients if name not in stages.holders),
        gradients=gradients,
        calls=calls,
    )


def _inputs(lowered: LoweredStep) -> tuple[Input, ...]:
    """What a call binds on this rank: each parameter, buffer and input of its stages once, and the seed."""
    program = lowered.program
    known = {value.name for value in program.inputs if value.role in ("parameter", "buffer", "input")} | {SEED}
    inputs = [value for stage in lowered.stages for value in stage.program.inputs]
    inputs += lowered.statistic_inputs
    found = {value.name: value for value in inputs if value.name in known}
    seeds = [value for value in found.values() if value.role == "seed"]
    if not seeds and any(is_random(node) for node in program.graph.nodes if node.op == "call_function"):
        seeds = [Input(role="seed", name=SEED, shape=(), dtype=torch.int64)]
    order = [value.name for value in program.inputs]
    plain = sorted((v for v in found.values() if v.role != "seed"), key=lambda value: order.index(value.name))
    return (*plain, *seeds)


def _gradients(program: Program, held: set[str]) -> tuple[Output, ...]:
    return tuple(
        output
        for node, output in zip(program.returned, program.outputs, strict=True)
        if output.role == "gradient" and output.name in held and isinstance(node, fx.Node)
    )


def _gradient_forms(program: Program, plan: Plan, groups: ProcessGroups, held: set[str]) -> dict[str, Form]:
    """Local shape and dtype of the gradients of this rank's parameters."""
    found = {}
    for node, output in zip(program.returned, program.outputs, strict=True):
        if output.role == "gradient" and output.name in held and isinstance(node, fx.Node):
            found[output.name] = _form(node.meta["val"], plan.parameters[output.name].stored, groups)
    return found


def _forms(stages: StagePrograms, layouts: Mapping[str, Layout], groups: ProcessGroups) -> dict[str, Form]:
    return {c.name: _form(c.node.meta["val"], layouts[c.name], groups) for c in stages.crossings if c.name in layouts}


def _form(value: Any, layout: Layout, groups: ProcessGroups) -> Form:
    return Form(tuple(local_shape(value.shape, layout, groups.mesh, groups.coordinate)), value.dtype)


def _pieces(
    stages: StagePrograms, layouts: Sequence[Mapping[str, Layout]], groups: ProcessGroups
) -> Callable[[Message], Sequence[SentPiece]]:
    """What of a value travels between which ranks of two rank groups; worked out once for each."""
    shapes = {c.name: tuple(c.node.meta["val"].shape) for c in stages.crossings}

    @cache
    def found(name: str, source: int, target: int) -> tuple[SentPiece, ...]:
        ends = [
            GroupLayout(layout=layouts[group][name], mesh=groups.meshes[group], ranks=groups.members(group))
            for group in (source, target)
        ]
        return tuple(piece.on(groups.device) for piece in route(shapes[name], *ends))

    return lambda message: found(message.name, message.source, message.target)


def _shared(
    stages: StagePrograms, schedule: Schedule, groups: ProcessGroups, program: Program, own: Plan
) -> SharedGradients:
    """For this rank's parameters that other rank groups hold too: the processes that add up their gradients."""
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    across = {}
    with_gradient = {output.name for output in _gradients(program, set(stages.holders))}
    for name in sorted(with_gradient):
        holders = _rank_groups(stages, schedule, name)
        if len(holders) < 2:
            continue
        if holders not in made:
            made[holders] = ranks_across(groups, holders)
        group = made[holders]
        if group is not None:
            across[name] = group
    shapes = {value.name: tuple(value.shape) for value in program.inputs if value.role == "parameter"}
    return SharedGradients(groups=groups, plan=own, across=across, shapes=shapes)


def _rank_groups(stages: StagePrograms, schedule: Schedule, parameter: str) -> tuple[int, ...]:
    """The rank groups that hold a parameter."""
    return tuple(sorted({group for stage in stages.holders[parameter] for group in schedule.holders[stage]}))


def _stage_parameters(stages: StagePrograms, schedule: Schedule, held: set[str]) -> StageParameters:
    groups = {name: _rank_groups(stages, schedule, name) for name, holders in stages.holders.items() if holders}
    return StageParameters(
        absent=frozenset(name for name in groups if name not in held),
        copies={name: len(found) for name, found in groups.items() if name in held and len(found) > 1},
    )
