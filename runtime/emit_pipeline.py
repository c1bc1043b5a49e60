"""Emit a pipeline: the stages of this rank, lowered, bound to processes and kernels, as one `Step`.

Every rank cuts the whole program, so that all agree on what crosses, and lowers its own stages only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autopar.graphs.forward_backward import Partition
from autopar.layouts.placement import Layout, local_shape
from autopar.parallel_plan import Plan
from autopar.passes.late_sums import CutGraph, cut_late_sums
from autopar.passes.lower import SEED, is_random, lower
from autopar.passes.once_per_step import Prepared, prepare_parameters
from autopar.passes.partition import split_forward_backward
from autopar.passes.stage_plans import crossing_layouts, stage_plan
from autopar.passes.stages import StagePrograms, cut_stages
from autopar.passes.weight_gradients import BackwardGraphs, split_backward
from autopar.program import Input, MicroProgram, Output, Program, returned_values
from autopar.runtime.consensus import attempt_on_all, gather_from_all
from autopar.runtime.emit import bind_groups, group_symbols
from autopar.runtime.kernels import GraphCall, kernels
from autopar.runtime.parameters import StageParameters
from autopar.runtime.pipeline import PipelineStep
from autopar.runtime.pipeline_routes import Ends, Piece, route
from autopar.runtime.pipeline_wires import Form, Message
from autopar.runtime.process_groups import StageProcesses
from autopar.runtime.shared_values import SharedGradients, StageResults, ranks_across
from autopar.runtime.stage_graphs import StageGraphs
from autopar.schedules.actions import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoweredStage:
    """The graphs of a stage, before they are bound to processes."""

    lowered: Program
    forward: fx.GraphModule
    backward: BackwardGraphs | None
    prepared: Prepared | None
    late: CutGraph | None
    totals: Mapping[int, Form]

    def graphs(self) -> list[fx.GraphModule]:
        found = [self.forward]
        found += [self.backward.whole] if self.backward is not None else []
        found += [self.prepared.prepare] if self.prepared is not None else []
        return [*found, self.late.reduce] if self.late is not None else found


def emit_pipeline(micro: MicroProgram, plan: Plan, groups: StageProcesses) -> PipelineStep:
    """The step of this rank under a plan with stages; all ranks call it alike.

    Raises PlanMismatchError for a plan of another graph, on every rank.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    schedule = pipeline.built(plan.micro_batches)
    cuts = [stage.last_operator for stage in pipeline.stages if stage.last_operator is not None]
    mine = [stage for stage, holders in enumerate(schedule.holders) if groups.group in holders]
    stages = attempt_on_all(lambda: cut_stages(micro.program, cuts))
    own = stage_plan(plan, stages, schedule, groups.group)
    lowered, statistics = attempt_on_all(lambda: _lowered(stages, plan, own, mine, groups))
    everything = [graph for stage in lowered.values() for graph in stage.graphs()]
    symbols = group_symbols(*everything, *(() if statistics is None else (statistics.graph_module,)))
    groups.create({symbol for found in gather_from_all(sorted(symbols)) for symbol in found})
    held = {name for name, holders in stages.holders.items() if holders & set(mine)}
    layouts = [crossing_layouts(plan, stages, schedule, group) for group in range(len(groups.meshes))]
    across = ranks_across(groups, range(len(groups.meshes)))
    assert across is not None
    return PipelineStep(
        micro=micro,
        lowered=replace(
            micro.program,
            inputs=_inputs(micro.program, lowered, statistics),
            outputs=_gradients(micro.program, held),
        ),
        plan=plan,
        own_plan=own,
        groups=groups,
        stages=stages,
        graphs={stage: _bound(micro, plan, stages, found, groups) for stage, found in lowered.items()},
        statistics=_statistics(statistics, groups, plan),
        schedule=schedule,
        forms=_forms(stages, layouts[groups.group], groups),
        pieces=_pieces(stages, layouts, groups),
        gradient_forms=_gradient_forms(micro.program, own, groups, held),
        shared=_shared(stages, schedule, groups, micro.program, own),
        stage_parameters=_stage_parameters(stages, schedule, held),
        results=StageResults(groups=groups, schedule=schedule, across=across, owners=stages.owners),
    )


def _lowered(
    stages: StagePrograms, plan: Plan, own: Plan, mine: list[int], groups: StageProcesses
) -> tuple[dict[int, _LoweredStage], Program | None]:
    assert plan.pipeline is not None
    recompute = [name for name, operator in own.operators.items() if operator.recompute]
    found = {}
    for stage in mine:
        lowered = lower(stages.programs[stage], own, groups.place)
        partition = split_forward_backward(lowered, recompute)
        once = plan.pipeline.stages[stage].gather_once
        found[stage] = _prepared(lowered, partition, set(stages.holders), once)
    statistics = None if stages.statistics is None else lower(stages.statistics, own, groups.place)
    return found, statistics


def _prepared(lowered: Program, partition: Partition, parameters: set[str], gather_once: bool) -> _LoweredStage:
    """What a stage does once per step, and its passes without that."""
    prepared = prepare_parameters(partition) if gather_once else None
    forward = prepared.forward if prepared else partition.forward
    backward = prepared.backward if prepared else partition.backward
    late, halves, totals = None, None, dict[int, Form]()
    if backward is not None:
        sent = len([o for o in lowered.outputs if o.role == "gradient" and o.name not in parameters])
        late = cut_late_sums(backward, sent, growing=gather_once)
        backward = late.unreduced if late is not None else backward
        halves = split_backward(backward, sent)
        returned = returned_values(backward.graph)
        totals = {i: Form(tuple(returned[i].meta["local_shape"]), returned[i].meta["dtype"]) for i in halves.totals}
    return _LoweredStage(lowered=lowered, forward=forward, backward=halves, prepared=prepared, late=late, totals=totals)


def _bound(
    micro: MicroProgram, plan: Plan, stages: StagePrograms, own: _LoweredStage, groups: StageProcesses
) -> StageGraphs:
    backward, prepared, late = own.backward, own.prepared, own.late
    if backward is not None:
        backward = replace(
            backward,
            whole=bind_groups(backward.whole, groups),
            inputs=bind_groups(backward.inputs, groups),
            weights=bind_groups(backward.weights, groups),
        )
    names = [output.name for output in own.lowered.outputs if output.role in ("loss", "output")]
    gradients = tuple(output.name for output in own.lowered.outputs if output.role == "gradient")
    return StageGraphs(
        lowered=own.lowered,
        forward=bind_groups(own.forward, groups),
        backward=backward,
        prepared=None if prepared is None else replace(prepared, prepare=bind_groups(prepared.prepare, groups)),
        late=None if late is None else replace(late, reduce=bind_groups(late.reduce, groups)),
        total_forms=own.totals,
        results=tuple(name for name in names if name in stages.owners),
        sent_forward=tuple(name for name in names if name not in stages.owners),
        sent_backward=tuple(name for name in gradients if name not in stages.holders),
        gradients=gradients,
        micro=micro,
        backend=plan.kernel_backend,
    )


def _statistics(
    statistics: Program | None, groups: StageProcesses, plan: Plan
) -> tuple[GraphCall, tuple[Input, ...]] | None:
    if statistics is None:
        return None
    return kernels(bind_groups(statistics.graph_module, groups), plan.kernel_backend), statistics.inputs


def _inputs(program: Program, own: Mapping[int, _LoweredStage], statistics: Program | None) -> tuple[Input, ...]:
    """What a call binds on this rank: each parameter, buffer and input of its stages once, and the seed."""
    known = {value.name for value in program.inputs if value.role in ("parameter", "buffer", "input")} | {SEED}
    programs = [stage.lowered for stage in own.values()] + ([statistics] if statistics else [])
    found = {value.name: value for part in programs for value in part.inputs if value.name in known}
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


def _gradient_forms(program: Program, plan: Plan, groups: StageProcesses, held: set[str]) -> dict[str, Form]:
    """Local shape and dtype of the gradients of this rank's parameters."""
    found = {}
    for node, output in zip(program.returned, program.outputs, strict=True):
        if output.role == "gradient" and output.name in held and isinstance(node, fx.Node):
            found[output.name] = _form(node.meta["val"], plan.parameters[output.name].stored, groups)
    return found


def _forms(stages: StagePrograms, layouts: Mapping[str, Layout], groups: StageProcesses) -> dict[str, Form]:
    return {c.name: _form(c.node.meta["val"], layouts[c.name], groups) for c in stages.crossings if c.name in layouts}


def _form(value: Any, layout: Layout, groups: StageProcesses) -> Form:
    return Form(tuple(local_shape(value.shape, layout, groups.mesh, groups.coordinate)), value.dtype)


def _pieces(
    stages: StagePrograms, layouts: Sequence[Mapping[str, Layout]], groups: StageProcesses
) -> Callable[[Message], Sequence[Piece]]:
    """What of a value travels between which ranks of two rank groups; worked out once for each."""
    shapes = {c.name: tuple(c.node.meta["val"].shape) for c in stages.crossings}

    @cache
    def found(name: str, source: int, target: int) -> tuple[Piece, ...]:
        ends = [
            Ends(layout=layouts[group][name], mesh=groups.meshes[group], ranks=groups.members(group))
            for group in (source, target)
        ]
        return route(shapes[name], *ends)

    return lambda message: found(message.name, message.source, message.target)


def _shared(
    stages: StagePrograms, schedule: Schedule, groups: StageProcesses, program: Program, own: Plan
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
