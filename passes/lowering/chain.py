"""The passes of the lowering in their order, and the one function that runs them.

    step = lowered_step(program, plan, rank)                         all of LOWERING: what the runtime runs
    step = lowered_step(program, plan, rank, until=write_local)      as far as a pass; a plan may be decided in between:
    step = resumed(step, plan)                                       the rest, under a plan that says more

A pass takes a `LoweredStage` and the `StageContext` it is made by, and returns the stage with what it makes. Behind
every pass observers look at the stage (`observers.py`): the checker under AUTOPAR_CHECK=1, the dump under AUTOPAR_DUMP.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TypeAlias

from torch.fx import GraphModule

from autopar.graphs.expert_capacity import with_expert_capacity
from autopar.graphs.expert_loads import with_expert_load
from autopar.passes.kernels.align_vocabulary import align_vocabulary
from autopar.passes.kernels.join_additions import join_additions, pack_copies
from autopar.passes.kernels.placed_rows import count_as_placed
from autopar.passes.kernels.sort_by_expert import sort_by_expert
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.passes.lowering.kept_on_host import with_gradients_sent, with_host_copies
from autopar.passes.lowering.lower import lower, remove_unused
from autopar.passes.lowering.micro_batch_graphs import adding_to_totals, without_statistics
from autopar.passes.lowering.observers import Observer
from autopar.passes.lowering.saved_in_forms import with_saved_forms
from autopar.passes.lowering.stage import LoweredStage, LoweredStep, StageContext
from autopar.passes.lowering.step_halves import split_forward_backward
from autopar.passes.overlap.copies_ahead import copies_ahead, moved_ahead
from autopar.passes.overlap.in_symmetric_memory import both_in_symmetric_memory, multiply_in_symmetric_memory
from autopar.passes.overlap.left_open import left_open
from autopar.passes.overlap.overlapped import overlapped, overlapped_graph
from autopar.passes.random_operators import SEED
from autopar.passes.runner import Pass, pass_name, run_pass
from autopar.passes.stages.cut_stages import cut_stages, uncut
from autopar.passes.stages.late_sums import cut_late_sums, last_pass
from autopar.passes.stages.once_per_step import first_forward, prepare_parameters
from autopar.passes.stages.stage_plans import stage_plan
from autopar.passes.stages.weight_gradients import split_backward
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_entries import EXCHANGES
from autopar.program import MicroProgram, Program, in_one_part
from autopar.schedules.folding_schedule import folding_schedule

StagePass: TypeAlias = Pass[LoweredStage, StageContext]

log = logging.getLogger(__name__)


def write_local(stage: LoweredStage, context: StageContext) -> LoweredStage:
    """Global shapes -> the local shapes and the collectives of a rank, as the layouts of the plan say."""
    return replace(stage, program=lower(context.program, context.plan, context.rank))


def sort_rows(stage: LoweredStage, context: StageContext) -> LoweredStage:
    """Rows of expert layers are sorted once per layer, or per chunk of one, by where a plan places their experts; what
    nobody reads, here and before, goes.

    Stages of a pipeline run their collectives one by one, and so their layers whole.
    """
    chunks = 0 if context.in_pipeline else context.plan.product_chunks.get(EXCHANGES, 0)
    count_as_placed(stage.program.graph, context.plan.expert_order)
    sort_by_expert(stage.program.graph, context.plan.mesh.axis_names, chunks)
    remove_unused(stage.program.graph)
    return stage


def join_kernels(stage: LoweredStage, context: StageContext) -> LoweredStage:
    """Additions -> the kernels of the norms beside them; on GPUs, copies around collectives with their padding -> one
    kernel. Vocabularies are filled up until rows of logits are aligned."""
    plan = context.plan
    align_vocabulary(stage.program.graph)
    join_additions(stage.program.graph, plan.kernel_backend, plan.recomputed)
    if plan.kernel_backend == "inductor":
        pack_copies(stage.program.graph)
    return stage


def split(stage: LoweredStage, context: StageContext) -> LoweredStage:
    """One graph -> a forward and a backward graph, with what is saved between them as the plan says."""
    plan, program = context.plan, stage.program
    parts = split_forward_backward(program, plan.recomputed, plan.recomputed_at)
    parts = with_saved_forms(parts, plan.saved_smaller, plan.mesh, plan.mesh.coordinate(context.rank), SEED)
    inputs = zip(program.placeholders, program.inputs, strict=True)
    on_host = {node.name for node, meaning in inputs if meaning.on_host}
    parts = with_host_copies(parts, on_host, plan.saved_on_host)
    return replace(stage, split=parts, unreduced=parts.backward)


def take_statistics(stage: LoweredStage, context: StageContext) -> LoweredStage:
    """Micro-batches without a pipeline: statistics become a graph of their own."""
    if context.in_pipeline or not context.adds_up:
        return stage
    parts, statistics = without_statistics(stage.program, stage.partition)
    return replace(stage, split=parts, statistics=statistics)


def gather_once(stage: LoweredStage, context: StageContext) -> LoweredStage:
    """What follows from parameters alone is made once per step, where the plan says so; what lies on the host is
    brought, and gathered, for every micro-batch."""
    if not context.gathers_once:
        return stage
    on_host = {meaning.name for meaning in stage.program.inputs if meaning.on_host}
    prepared = prepare_parameters(stage.partition, on_host)
    if not context.in_pipeline and not prepared.count:
        return stage
    parts = replace(stage.partition, forward=prepared.forward, backward=prepared.backward)
    return replace(stage, split=parts, prepared=prepared, unreduced=prepared.backward)


def add_up_parts(stage: LoweredStage, context: StageContext) -> LoweredStage:
    """Micro-batches without a pipeline: backward adds gradients to totals, without the sums that can wait; in logical
    shards it returns them, since the runtime folds them."""
    backward = stage.partition.backward
    if context.in_pipeline or not context.adds_up or backward is None or context.plan.shards:
        return stage
    any_on_host = any(meaning.on_host for meaning in stage.program.inputs)
    late = cut_late_sums(backward, growing=context.gathers_once and not any_on_host)
    added, totals = adding_to_totals(backward if late is None else late.unreduced)
    return replace(stage, split=replace(stage.partition, backward=added), late=late, totals=totals)


def cut_passes(stage: LoweredStage, context: StageContext) -> LoweredStage:
    """Backward of a stage of a pipeline: without the sums that can wait, adding to totals, whole and in halves."""
    backward = stage.partition.backward
    if backward is None or not context.in_pipeline:
        return stage
    late = cut_late_sums(backward, stage.sent, growing=context.gathers_once)
    halves = split_backward(backward if late is None else late.unreduced, stage.sent)
    parts = replace(stage.partition, backward=halves.whole)
    return replace(stage, split=parts, late=late, halves=halves, totals=halves.totals)


def use_symmetric_memory(stage: LoweredStage, context: StageContext) -> LoweredStage:
    """Products with their collective in symmetric memory, where the plan says so; never in stages of a pipeline."""
    groups = context.plan.symmetric_memory
    if not groups or context.in_pipeline:
        return stage
    unreduced = None if stage.unreduced is None else multiply_in_symmetric_memory(stage.unreduced, groups)
    return replace(stage, split=both_in_symmetric_memory(stage.partition, groups), unreduced=unreduced)


def start_early(stage: LoweredStage, context: StageContext) -> LoweredStage:
    """Products in chunks, collectives in buckets, started early and awaited late, as the plan says; copies between
    device and host likewise, those of gradients among them."""
    plan = context.plan
    parts = overlapped(stage.partition, plan.bucket_bytes, plan.product_chunks)
    on_host = {meaning.name for meaning in stage.program.inputs if meaning.on_host}
    if on_host and parts.backward is not None and not context.adds_up:
        gradients = [output.name for output in stage.program.outputs if output.role == "gradient"]
        parts = replace(parts, backward=with_gradients_sent(parts.backward, [name in on_host for name in gradients]))
    early = replace(stage, split=copies_ahead(parts, plan.copy_ahead_bytes))
    return _in_halves(early, stage) if context.in_pipeline else _with_ends(early, stage)


def _with_ends(stage: LoweredStage, cut: LoweredStage) -> LoweredStage:
    """The stage with what its first forward and its last backward run instead, which make once per step what is made
    once, between their own operators. cut: the stage before its collectives were started early."""
    parts, prepared, late = cut.partition, cut.prepared, cut.late
    first = last = None
    if prepared is not None:
        first = _started_early(first_forward(parts.forward, prepared), stage.plan)
    if late is not None and parts.backward is not None:
        last = _started_early(last_pass(parts.backward, late, cut.totals), stage.plan)
    return replace(stage, first=first, last=last)


def _in_halves(stage: LoweredStage, cut: LoweredStage) -> LoweredStage:
    """A stage of a pipeline, likewise: both halves of its backward, and the sums that wait, which start with the last
    pass of it, or behind that, and end behind the last pass of the rank."""
    plan, halves = stage.plan, cut.halves
    if halves is None or stage.partition.backward is None:
        return stage
    inputs, weights = (_started_early(graph, plan) for graph in (halves.inputs, halves.weights))
    stage = replace(stage, halves=replace(halves, whole=stage.partition.backward, inputs=inputs, weights=weights))
    if cut.late is None or plan.bucket_bytes is None or stage.context.last_kind is None:
        return stage
    last = last_one_by_one(cut)
    if last is None:
        reduce, ending = left_open(_started_early(cut.late.reduce, plan))
        return replace(stage, late=replace(cut.late, reduce=reduce), ending=ending)
    last, ending = left_open(_started_early(last, plan))
    return replace(stage, last=last, ending=ending)


def last_one_by_one(cut: LoweredStage) -> GraphModule | None:
    """The last pass of the backward of a stage of a pipeline, with the sums that wait behind what it computes; None
    where there are none, and where it sends gradients to other stages, which sums beside it would delay: they start
    behind it then, while others compute. cut: the stage before its collectives are started early."""
    halves, kind = cut.halves, cut.context.last_kind
    if halves is None or cut.late is None or kind is None or (kind != "W" and cut.sent):
        return None
    return last_pass(halves.weights if kind == "W" else halves.whole, cut.late, cut.totals)


def _started_early(graph: GraphModule, plan: Plan) -> GraphModule:
    """Another graph that a step runs, issued as forward and backward are."""
    return moved_ahead(overlapped_graph(graph, plan.bucket_bytes, plan.product_chunks), plan.copy_ahead_bytes)


def hold_sums(stage: LoweredStage, context: StageContext) -> LoweredStage:
    """Backward without its last sums over ranks, and these sums: what runs while `no_sync` is open, and behind it."""
    late = None if context.adds_up or stage.unreduced is None else cut_late_sums(stage.unreduced)
    if late is None:
        return stage
    plan = context.plan
    late = replace(
        late,
        unreduced=overlapped_graph(late.unreduced, plan.bucket_bytes, plan.product_chunks),
        reduce=overlapped_graph(late.reduce, plan.bucket_bytes),
    )
    return replace(stage, late=late)


LOWERING: tuple[StagePass, ...] = (
    write_local,
    sort_rows,
    join_kernels,
    split,
    take_statistics,
    gather_once,
    add_up_parts,
    cut_passes,
    use_symmetric_memory,
    start_early,
    hold_sums,
)


def lowered_step(
    program: Program | MicroProgram,
    plan: Plan,
    rank: int,
    *,
    until: StagePass = LOWERING[-1],
) -> LoweredStep:
    """What a rank runs in a step under a plan.

    program: captured, in the micro-batches of the plan; the whole batch is one of them. Groups of operators become the
    kernels of ours that the plan names first (`with_kernels`). until: the last pass to run.
    Raises PlanMismatchError for entries of the plan that are missing, or that the graph, the mesh or the rules do not
    allow.
    """
    return lowered_on(program, plan, (rank,), until=until)


def step_to_run(program: Program | MicroProgram, plan: Plan, rank: int) -> LoweredStep:
    """As `lowered_step`, but for what only `no_sync` needs: `resumed` makes that, where it is first open."""
    return lowered_step(program, plan, rank, until=LOWERING[LOWERING.index(hold_sums) - 1])


def lowered_on(
    program: Program | MicroProgram,
    plan: Plan,
    ranks: Sequence[int],
    *,
    until: StagePass = LOWERING[-1],
) -> LoweredStep:
    """As `lowered_step`: every stage that one of several ranks holds, on the first rank group that holds it and that
    has one of them."""
    micro = with_kernels(in_one_part(program) if isinstance(program, Program) else program, plan.kernels)
    micro = with_expert_load(micro, plan.expert_load, plan.replicated_experts, plan.expert_order)
    micro = with_expert_capacity(micro, plan.expert_capacity)
    return resumed(_begun(micro, plan, tuple(ranks)), plan, until=until)


def resumed(step: LoweredStep, plan: Plan, *, until: StagePass = LOWERING[-1]) -> LoweredStep:
    """The step behind the passes that it lacks, up to `until`, under a plan of the same layouts that may say more.

    Graphs that the step holds may be written into: it is not to be used again, but from `split` on.
    """
    end = LOWERING.index(until) + 1
    stages = tuple(_run(_under(stage, step, plan), step.done, end) for stage in step.stages)
    statistics = step.statistics
    if statistics is not None and step.done == 0:
        context = replace(stages[0].context, program=statistics)
        begun = LoweredStage(context=context, program=statistics)
        statistics = _run(begun, 0, LOWERING.index(join_kernels) + 1).program
    return replace(step, plan=plan, stages=stages, statistics=statistics, done=max(end, step.done))


def _run(stage: LoweredStage, begin: int, end: int) -> LoweredStage:
    observer = Observer(stage)
    for number, lowering_pass in enumerate(LOWERING[begin:end], begin):
        stage, seconds = run_pass(stage, lowering_pass, stage.context)
        name = pass_name(lowering_pass)
        log.debug("stage %d, %s: %.3f CPU s", stage.number, name, seconds)
        observer.look(stage, number, name)
    return stage


def _under(stage: LoweredStage, step: LoweredStep, plan: Plan) -> LoweredStage:
    """The stage with what a plan decided since; of stages of a pipeline only how collectives are issued."""
    if plan is step.plan:
        return stage
    if stage.context.in_pipeline:
        plan = replace(stage.plan, bucket_bytes=plan.bucket_bytes, product_chunks=plan.product_chunks)
    return replace(stage, context=replace(stage.context, plan=plan))


def _begun(micro: MicroProgram, plan: Plan, ranks: tuple[int, ...]) -> LoweredStep:
    """The stages of the ranks, before the first pass; a plan without stages has one."""
    pipeline = plan.staged
    schedule = folding_schedule(plan.micro_batches) if plan.shards else pipeline.built(plan.micro_batches)
    cut = cut_stages(micro.program, pipeline.cuts) if plan.in_stages else uncut(micro.program)
    places = {plan.group_of(rank): rank for rank in reversed(ranks)}

    @cache
    def own_plan(group: int) -> Plan:
        return stage_plan(plan, cut, schedule, group) if plan.in_stages else plan

    stages = []
    for number, holders in enumerate(schedule.holders):
        group = next((group for group in holders if group in places), None)
        if group is None:
            continue
        context = StageContext(
            number=number,
            plan=own_plan(group),
            rank=places[group] - plan.rank_groups[group].first_rank,
            program=cut.programs[number],
            micro=micro,
            parameters=frozenset(cut.holders),
            in_pipeline=plan.in_stages,
            in_stage_once=pipeline.stages[number].gather_once,
            last_kind=schedule.last_kind(number, group),
        )
        stages.append(LoweredStage(context=context, program=context.program))
    return LoweredStep(
        plan=plan,
        micro=micro,
        ranks=ranks,
        stages=tuple(stages),
        cut=cut,
        schedule=schedule,
        statistics=cut.statistics,
        done=0,
    )
