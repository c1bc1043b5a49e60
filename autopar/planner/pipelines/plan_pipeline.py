"""Plan a pipeline: over numbers of micro-batches and sub-mesh plans, the shortest simulated step that fits.

    dims={"pp": 2, "tp": 2}, 8 samples     micro-batches 2, 4, 8; for each a plan of the part on tp=2, its block table,
                                           and every family of schedules (or the one that is pinned)

More than one micro-batch needs a batch that can be cut (`planner.batch_flow` says why where it cannot). Tried counts
are the divisors of the batch up to `parts_per_group` per rank group, fewest first, until the step grew twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.errors import ConfigurationError, InfeasibleError
from autopar.hardware.rank_groups import sub_cluster
from autopar.later import later
from autopar.layouts.placement import Mesh
from autopar.planner.batch.batch_flow import NotSeparable
from autopar.planner.batch.micro_batch_program import Recapture
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.shortage import DoesNotFit
from autopar.planner.meshes.choose_mesh import Chosen, choose_mesh
from autopar.planner.meshes.choose_micro_batches import in_parts_of
from autopar.planner.meshes.mesh_shapes import resolve_meshes
from autopar.planner.one_mesh.mesh_plan import Candidate
from autopar.planner.one_mesh.query import Query
from autopar.planner.pipelines.block_costs import Solved
from autopar.planner.pipelines.block_table import BlockTable
from autopar.planner.pipelines.choose_pipeline import Pipeline, Tried, families_for, try_tables
from autopar.planner.pipelines.pipeline_bound import least_step_seconds, least_unequal_seconds
from autopar.planner.pipelines.runs import Runs, find_runs
from autopar.planner.pipelines.solved_submeshes import SubMeshes
from autopar.planner.pipelines.spanned_stages import Spanned, with_spans
from autopar.planner.pipelines.submesh import asked_modes, solved_on, tables_of
from autopar.planner.pipelines.unequal_groups import Unequal, best_unequal
from autopar.planner.pipelines.write_groups import unequal_plan
from autopar.planner.pipelines.write_pipeline import check_cut, pipeline_plan
from autopar.planner.problem.constraint_targets import meshes_with_axes
from autopar.planner.problem.limits import LIMITS
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_bytes, format_seconds
from autopar.plans.plan_value import Baseline
from autopar.program import batch_size
from autopar.request.pipeline_request import SEARCHED, UNEQUAL_FAMILIES, PipelineRequest
from autopar.schedules.list_scheduler import FAMILIES

log = logging.getLogger(__name__)

search_order: Callable[[Pipeline], tuple[Pipeline, str]] = later(
    "autopar.planner.pipelines.searched_order", "search_order"
)
"""Asked for by name only, and brings CP-SAT."""

SHOWN = 4
"""The note on other schedules lists at most this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A pipeline and what its plan is written from. least_seconds: no pipeline of its block tables takes less."""

    query: Query
    candidate: Candidate
    solved: Solved
    runs: Runs
    pipeline: Pipeline
    tried: Sequence[Tried]
    least_seconds: float


@dataclass(frozen=True, slots=True)
class _OnMesh:
    """A plan of the sub-mesh, and the stages that were made of it."""

    candidate: Candidate
    stages: Spanned


def plan_pipeline(query: Query, asked: PipelineRequest) -> Plan:
    """The best plan with these stages. query: of the whole batch on the whole cluster.

    Raises ConfigurationError where the model or the batch cannot be cut, and InfeasibleError where nothing fits.
    """
    if asked.sizes:
        return _plan_unequal(query, asked)
    cluster = sub_cluster(query.cluster, asked.num_groups)
    meshes = meshes_with_axes(query.constraints.placements, resolve_meshes(cluster, None, dict(asked.dims) or None))
    best: _Found | None = None
    failures: list[InfeasibleError] = []
    worse, least = 0, math.inf
    for part in _parts(query, asked.num_groups):
        try:
            found = _best_on(query, replace(part, cluster=cluster, warm_start=None), asked, meshes)
        except InfeasibleError as error:
            failures.append(error)
            continue
        least = min(least, found.least_seconds)
        log.info(
            f"{found.pipeline.micro_batches} micro-batches: {found.pipeline.family}, predicted "
            f"{format_seconds(found.pipeline.step_seconds)}"
        )
        if best is not None and found.pipeline.step_seconds >= best.pipeline.step_seconds:
            worse += 1
        else:
            best, worse = found, 0
        if worse == LIMITS.slower_counts or query.deadline.left() <= 0.0:
            break
    if best is None:
        raise failures[0]
    notes = _others(best.tried)
    if asked.family == SEARCHED:
        pipeline, note = search_order(best.pipeline)
        best, notes = replace(best, pipeline=pipeline), [note, *notes]
    plan = pipeline_plan(best.query, best.candidate.solution, best.solved, best.runs, best.pipeline, least)
    return replace(
        plan, cluster=query.cluster.name, notes=(*plan.notes, *notes), alternatives=_alternatives(best.tried)
    )


def _plan_unequal(query: Query, asked: PipelineRequest) -> Plan:
    """The best plan with stages on groups of these sizes."""
    shapes = SubMeshes(query, needed_recapture(query))
    size = batch_size(query.program) or 1
    counts = micro_batch_counts(size, asked.num_groups) if query.micro_batches is None else [query.micro_batches]
    best: Unequal | None = None
    least, reason = math.inf, "the batch has no micro-batches to keep the stages busy"
    for count in counts:
        try:
            subs = [sub for devices in sorted(set(asked.sizes)) for sub in shapes.of(count, devices)]
        except NotSeparable as error:
            reason = f"the batch cannot be cut: {error}"
            continue
        families = (asked.family,) if asked.family else UNEQUAL_FAMILIES
        per_node = query.cluster.devices_per_node
        found = best_unequal(subs, [(query.cluster.num_devices, per_node)], count, asked.sizes, families)
        reason = f"nothing fits {format_bytes(query.budget_bytes)} per device, or groups lie across nodes"
        if found is None:
            continue
        least = min(least, least_unequal_seconds([sub.table for sub in subs], asked.sizes, count))
        log.info(f"{count} micro-batches: {found.pipeline.family} {format_seconds(found.pipeline.step_seconds)}")
        if best is None or found.pipeline.step_seconds < best.pipeline.step_seconds:
            best = found
    if best is None:
        raise InfeasibleError(f"no pipeline on groups of {list(asked.sizes)} devices: {reason}")
    check_cut(best.subs[0].query, best.subs[0].runs, best.pipeline)
    return unequal_plan(best, least, query.cluster.name)


def needed_recapture(query: Query) -> Recapture:
    """What gives the program at another batch. Raises ConfigurationError where it is given at one size only."""
    if query.recapture is None:
        raise ConfigurationError("stages take the batch in parts: pass a recapture")
    return query.recapture


def _least_seconds(tables: Sequence[BlockTable], asked: PipelineRequest, count: int) -> float:
    """What no pipeline with as many micro-batches is under on these tables, of the families that were allowed."""
    policies = [FAMILIES[family] for family in families_for(asked.family)]
    one_each = all(policy.chunks == (1,) and not policy.both_ways for policy in policies)
    both_ways = any(policy.both_ways for policy in policies)
    return min(
        least_step_seconds(table, asked.num_groups, count, one_stage_each=one_each, both_ways=both_ways)
        for table in tables
    )


def micro_batch_counts(batch: int, num_groups: int) -> list[int]:
    """Divisors of the batch that are tried: powers of two times the groups' number or what lies nearest, but 1."""
    divisors = [count for count in range(2, min(batch, LIMITS.parts_per_group * num_groups) + 1) if batch % count == 0]
    wanted = [num_groups * factor for factor in (1, 2, 4, LIMITS.parts_per_group)] if divisors else []

    def nearest(want: int) -> int:
        return min(divisors, key=lambda count: (abs(math.log(count / want)), count))

    return sorted(set(map(nearest, wanted)))


def _parts(query: Query, num_groups: int) -> Iterator[Query]:
    """The question in every number of micro-batches that is tried."""
    size = batch_size(query.program) or 1
    counts = micro_batch_counts(size, num_groups) if query.micro_batches is None else [query.micro_batches]
    if not counts:
        raise ConfigurationError(
            f"pp={num_groups}: a batch of {size} has no micro-batches to keep the stages busy: pass a larger batch, or "
            "micro_batches=1 to run the stages one after another"
        )
    yielded = False
    reason: NotSeparable | None = None
    for number in counts:
        try:
            micro = query.in_parts(number, needed_recapture(query))
        except NotSeparable as error:
            reason = reason or error
            continue
        yielded = True
        yield in_parts_of(query, micro)
    if not yielded:
        raise ConfigurationError(
            f"pp={num_groups}: stages take the batch in parts, and it cannot be cut: {reason}; plan without pp"
        ) from reason


def _best_on(query: Query, part: Query, asked: PipelineRequest, meshes: Sequence[Mesh]) -> _Found:
    """The best pipeline of one number of micro-batches. query: of the whole; part: of one part on the sub-mesh."""
    lifetimes = Lifetimes(part.program)
    runs = find_runs(lifetimes)
    families = families_for(asked.family)
    count = 1 if part.micro is None else part.micro.count
    tried: list[Tried] = []
    blocks: list[_OnMesh] = []
    modes = asked_modes(query)
    for share in LIMITS.sub_mesh_memory if part.cluster.num_devices > 1 else (1.0,):
        budget = share * asked.num_groups * query.budget_bytes
        chosen: Chosen = choose_mesh(replace(part, budget_bytes=budget, recompute=None), meshes)
        if chosen.best is None:
            if tried:
                break
            raise _shortage(query, asked, count, chosen.failures[0])
        solved = solved_on(part, chosen.best, lifetimes)
        tables = tables_of(query, replace(part, budget_bytes=query.budget_bytes), solved, runs, asked.num_groups, modes)
        tried = try_tables(tables, asked.num_groups, count, families)
        blocks.append(_OnMesh(chosen.best, Spanned(solved=solved, runs=runs, tables=tables, tried=tried)))
        if tried[0].pipeline is not None:
            break
    found = _fitting(query, part, asked, count, blocks)
    assert found.stages.pipeline is not None
    check_cut(part, found.stages.runs, found.stages.pipeline)
    return _Found(
        query=part,
        candidate=found.candidate,
        solved=found.stages.solved,
        runs=found.stages.runs,
        pipeline=found.stages.pipeline,
        tried=found.stages.tried,
        least_seconds=_least_seconds(blocks[-1].stages.tables, asked, count),
    )


def _fitting(query: Query, part: Query, asked: PipelineRequest, count: int, blocks: Sequence[_OnMesh]) -> _OnMesh:
    """The last one where it fits, else the first with spans of blocks that does; where "full" was asked for, what holds
    less. Raises InfeasibleError where nothing fits."""
    last, seen = blocks[-1], list(blocks)
    fits = last.stages.pipeline is not None
    if fits and query.recompute != "full":
        return last
    for each in [last] if fits else blocks:
        one, families = each.stages, families_for(asked.family)
        spans = with_spans(query, part, one.solved, one.runs, one.tables[-1], asked.num_groups, count, families)
        if spans is not None:
            seen.append(replace(each, stages=spans))
            if _is_better(spans, last.stages):
                return seen[-1]
    if fits:
        return last
    held = [one.least_peak_bytes for each in seen for one in each.stages.tried]
    raise _too_full(query, asked, count, min((each for each in held if each is not None), default=None))


def _is_better(spans: Spanned, blocks: Spanned) -> bool:
    """Whether spans fit where blocks do not, or hold less."""
    if spans.pipeline is None or blocks.pipeline is None:
        return spans.pipeline is not None
    return spans.pipeline.peak_bytes < (1.0 - LIMITS.least_relief_of_spans) * blocks.pipeline.peak_bytes


def _shortage(query: Query, asked: PipelineRequest, count: int, failure: Exception) -> Exception:
    """What failed on a sub-mesh that had the memory of all, in the words of one device."""
    if not isinstance(failure, DoesNotFit):
        return failure
    return _too_full(query, asked, count, failure.needed_bytes / asked.num_groups)


def _too_full(query: Query, asked: PipelineRequest, count: int, least_bytes: float | None) -> InfeasibleError:
    needs = (
        "with full recomputation neither" if least_bytes is None else f"it needs {format_bytes(least_bytes)} or more"
    )
    return InfeasibleError(
        f"no pipeline of {asked.num_groups} groups and {count} micro-batches fits {format_bytes(query.budget_bytes)} "
        f"per device: {needs}; more micro-batches, more devices per stage or a higher memory_limit may fit"
    )


def _others(tried: Sequence[Tried]) -> list[str]:
    """What other schedules would have taken with as many micro-batches."""
    shown = [
        f"{_name(one)} {format_seconds(one.pipeline.step_seconds)}" if one.pipeline else f"{_name(one)} does not fit"
        for one in tried[1 : SHOWN + 1]
    ]
    return [f"other schedules: {', '.join(shown)}"] if shown else []


def _alternatives(tried: Sequence[Tried]) -> tuple[Baseline, ...]:
    """The same as alternatives of the plan."""
    return tuple(
        Baseline(
            name=f"schedule {_name(one)}",
            dims={},
            objective_seconds=one.pipeline.step_seconds if one.pipeline else None,
            error=None if one.pipeline else "does not fit",
        )
        for one in tried[1:]
    )


def _name(one: Tried) -> str:
    return one.family if one.chunks == 1 else f"{one.family} with {one.chunks} chunks"
