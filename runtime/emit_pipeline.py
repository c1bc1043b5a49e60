"""Emit a pipeline: the stages of this rank, lowered, bound to processes and kernels, as one `Step`.

Every rank cuts the whole program, so that all agree on what crosses, and lowers its own stages only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autopar.layout import local_shape
from autopar.parallel_plan import Plan
from autopar.passes.lower import SEED, is_random, lower
from autopar.passes.partition import Partition, split_forward_backward
from autopar.passes.stage_plans import stage_plan
from autopar.passes.stages import StagePrograms, cut_stages
from autopar.passes.weight_gradients import BackwardGraphs, split_backward
from autopar.program import Input, MicroProgram, Output, Program
from autopar.runtime.consensus import attempt_on_all, gather_from_all
from autopar.runtime.emit import bind_groups, group_symbols
from autopar.runtime.kernels import GraphCall, kernels
from autopar.runtime.parameters import StageParameters
from autopar.runtime.pipeline import PipelineStep
from autopar.runtime.pipeline_wires import Form
from autopar.runtime.process_groups import StageProcesses, rank
from autopar.runtime.stage_graphs import StageGraphs
from autopar.schedules.actions import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoweredStage:
    lowered: Program
    partition: Partition
    backward: BackwardGraphs | None

    def graphs(self) -> list[fx.GraphModule]:
        backward = self.backward
        return [self.partition.forward, *((backward.whole,) if backward is not None else ())]


def emit_pipeline(micro: MicroProgram, plan: Plan, groups: StageProcesses) -> PipelineStep:
    """The step of this rank under a plan with stages; all ranks call it alike.

    Raises PlanMismatchError for a plan of another graph, on every rank.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    schedule = pipeline.built(plan.micro_batches)
    cuts = [stage.last_operator for stage in pipeline.stages if stage.last_operator is not None]
    mine = [stage for stage, holding in enumerate(schedule.holders) if groups.group in holding]
    stages, own, statistics = attempt_on_all(lambda: _lowered(micro, plan, cuts, mine))
    everything = [graph for stage in own.values() for graph in stage.graphs()]
    symbols = group_symbols(*everything, *(() if statistics is None else (statistics.graph_module,)))
    groups.whole.create({symbol for found in gather_from_all(sorted(symbols)) for symbol in found})
    held = {name for name, holders in stages.holders.items() if holders & set(mine)}
    inputs = _inputs(micro.program, own, statistics)
    return PipelineStep(
        micro=micro,
        lowered=replace(micro.program, inputs=inputs, outputs=_gradients(micro.program, held)),
        plan=plan,
        groups=groups,
        stages=stages,
        graphs={stage: _bound(micro, plan, stages, stage, lowered, groups) for stage, lowered in own.items()},
        statistics=_statistics(statistics, groups, plan),
        schedule=schedule,
        forms=_forms(stages, plan, groups),
        gradient_forms=_gradient_forms(micro.program, plan, groups, held),
        shared=_shared(stages, schedule, groups, micro.program),
        stage_parameters=_stage_parameters(stages, schedule, held),
    )


def _lowered(
    micro: MicroProgram, plan: Plan, cuts: list[str], mine: list[int]
) -> tuple[StagePrograms, dict[int, _LoweredStage], Program | None]:
    stages = cut_stages(micro.program, cuts)
    layouts = stage_plan(plan, stages)
    recompute = [name for name, operator in plan.operators.items() if operator.recompute]
    own = {}
    for stage in mine:
        lowered = lower(stages.programs[stage], layouts, rank())
        partition = split_forward_backward(lowered, recompute)
        sent = len([o for o in lowered.outputs if o.role == "gradient" and o.name not in stages.holders])
        backward = None if partition.backward is None else split_backward(partition.backward, sent)
        own[stage] = _LoweredStage(lowered=lowered, partition=partition, backward=backward)
    statistics = None if stages.statistics is None else lower(stages.statistics, layouts, rank())
    return stages, own, statistics


def _bound(
    micro: MicroProgram,
    plan: Plan,
    stages: StagePrograms,
    stage: int,
    own: _LoweredStage,
    groups: StageProcesses,
) -> StageGraphs:
    backward = own.backward
    bound = None
    if backward is not None:
        bound = replace(
            backward,
            whole=bind_groups(backward.whole, groups),
            inputs=bind_groups(backward.inputs, groups),
            weights=bind_groups(backward.weights, groups),
        )
    names = [output.name for output in own.lowered.outputs if output.role in ("loss", "output")]
    gradients = tuple(output.name for output in own.lowered.outputs if output.role == "gradient")
    return StageGraphs(
        lowered=own.lowered,
        forward=bind_groups(own.partition.forward, groups),
        backward=bound,
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


def _forms(stages: StagePrograms, plan: Plan, groups: StageProcesses) -> dict[str, Form]:
    layouts = stage_plan(plan, stages).inputs
    return {c.name: _form(c.node.meta["val"], layouts[c.name], groups) for c in stages.crossings}


def _form(value: Any, layout: Any, groups: StageProcesses) -> Form:
    shape = local_shape(value.shape, layout, groups.mesh, groups.mesh.coordinate(rank()))
    return Form(tuple(shape), value.dtype)


def _shared(
    stages: StagePrograms, schedule: Schedule, groups: StageProcesses, program: Program
) -> dict[str, dist.ProcessGroup]:
    """For this rank's parameters that other rank groups hold too: the processes with the same block of it."""
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    shared = {}
    with_gradient = {output.name for output in _gradients(program, set(stages.holders))}
    for name in sorted(with_gradient):
        holders = tuple(sorted({group for stage in stages.holders[name] for group in schedule.holders[stage]}))
        if len(holders) < 2:
            continue
        if holders not in made:
            made[holders] = _group_of(holders, groups)
        group = made[holders]
        if group is not None:
            shared[name] = group
    return shared


def _stage_parameters(stages: StagePrograms, schedule: Schedule, held: set[str]) -> StageParameters:
    groups = {
        name: {group for stage in holders for group in schedule.holders[stage]}
        for name, holders in stages.holders.items()
        if holders
    }
    return StageParameters(
        absent=frozenset(name for name in groups if name not in held),
        copies={name: len(found) for name, found in groups.items() if name in held and len(found) > 1},
    )


def _group_of(holders: tuple[int, ...], groups: StageProcesses) -> dist.ProcessGroup | None:
    """One process group per place in the rank groups `holders`; all ranks create all of them. None: not a member."""
    size, mine = groups.mesh.size, None
    for place in range(size):
        ranks = [holder * size + place for holder in holders]
        group = dist.new_group(ranks)
        if rank() in ranks:
            mine = group
    return mine
