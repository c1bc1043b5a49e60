"""Pipelines beside the free search: a few of them, within a share of its time.

    2 nodes of 8     2 groups of 8 or (4, 2), 4 of 4 or (2, 2), 8 of 2, 16 of 1, each in some numbers of micro-batches,
                     the best estimate first; then stages on groups of different sizes

`pipeline_estimates.py` orders them, over data x tensor meshes and numbers of micro-batches together; those with as many
micro-batches share their program. What was solved for a size serves every
pipeline of that size. A pipeline whose bound (`pipeline_bound.py`) is above the best step so far is not played. `QUICK`
are the schedules that are compared, for less than the time of one solve.

Restricted, and said in a note: few meshes, solved without a memory limit (where no cut of that fits, with the layouts
that axes of the usual names stand for); few numbers of micro-batches; layouts at the borders of stages are those of the
sub-mesh's plan. `mode="max"` compares more, `dims={"pp": ...}` pins.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import ConfigurationError
from autopar.layouts.placement import Mesh
from autopar.planner.batch.batch_flow import NotSeparable
from autopar.planner.one_mesh.query import Query
from autopar.planner.pipelines.choose_pipeline import Pipeline, try_tables
from autopar.planner.pipelines.pipeline_bound import least_over_all_groups, least_step_seconds
from autopar.planner.pipelines.pipeline_estimates import PipelineEstimate, PipelineTraffic, estimates, look_faster
from autopar.planner.pipelines.solved_submeshes import SubMesh, SubMeshes
from autopar.planner.pipelines.spanned_stages import with_spans
from autopar.planner.pipelines.unequal_groups import Unequal, best_unequal
from autopar.planner.pipelines.write_groups import unequal_plan
from autopar.planner.pipelines.write_pipeline import check_cut, pipeline_plan
from autopar.planner.problem.limits import LIMITS
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_seconds
from autopar.plans.plan_value import Baseline

log = logging.getLogger(__name__)

QUICK = ("1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved")
DOES_NOT_FIT = "does not fit"
SHOWN = 6
"""Pipelines that the note lists."""
USUAL_NAMES: Mapping[int, tuple[tuple[str, ...], ...]] = {
    1: (("dp_shard",), ("tp",)),
    2: (("dp_replicate", "tp"), ("dp_shard", "tp")),
    3: (("dp_replicate", "dp_shard", "tp"),),
}
"""Number of axes -> names under which a sub-mesh is solved again where what is cheapest does not fit: with samples and
sequences cut over all devices, every one may hold the weights of the whole stage."""


@dataclass(frozen=True, slots=True)
class ComparedPipeline:
    """A pipeline that was looked at: what came out, and the step or the bound of it in seconds, where known."""

    name: str
    outcome: str
    step_seconds: float | None = None
    bound_seconds: float | None = None

    @property
    def text(self) -> str:
        """The comparison as a line of a note."""
        return f"{self.name}: {self.outcome}"

    @property
    def does_not_fit(self) -> bool:
        """Whether memory ruled it out."""
        return self.outcome == DOES_NOT_FIT


@dataclass(slots=True, kw_only=True)
class Compared:
    """What the search found. least_seconds: no pipeline that was compared takes less, whatever its cut, its schedule,
    its recomputation and the memory; infinity where none was."""

    best: tuple[Pipeline, SubMesh] | Unequal | None = None
    least_seconds: float = math.inf
    tried: list[ComparedPipeline] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        """Of the best pipeline; infinite where none was found."""
        if self.best is None:
            return math.inf
        found = self.best.pipeline if isinstance(self.best, Unequal) else self.best[0]
        return found.step_seconds


def compare_pipelines(query: Query, plain_seconds: float, work_seconds: float | None, spent_seconds: float) -> Compared:
    """The best of a few pipelines. plain_seconds: of a step without stages, infinity where nothing fits; work_seconds:
    what devices compute in it, None: perfect work.

    spent_seconds: CPU seconds of the search so far, of which a share may pass before no other sub-mesh is solved; where
    nothing else is known, as many again."""
    assert query.recapture is not None, "stages take the batch in parts"
    began, compared, shapes = time.process_time(), Compared(), SubMeshes(query, query.recapture)
    below = plain_seconds * LIMITS.slower_pipelines
    traffic = PipelineTraffic.of(query, work_seconds)
    left = estimates(query, traffic)
    promising = look_faster(query, traffic, left, plain_seconds)
    share = LIMITS.promising_pipeline_share if promising else LIMITS.pipeline_share
    until = began + max(LIMITS.pipeline_seconds, spent_seconds * (1.0 if math.isinf(plain_seconds) else share))
    log.info(f"{len(left)} pipelines, {until - began:.0f} CPU s for them; guessed first: {_estimated(left)}")
    broken: dict[int, str] = {}
    for place, estimate in enumerate(in_order(left)):
        ends = max(until, began + LIMITS.first_pipeline_seconds) if place < LIMITS.first_pipelines else until
        ends = math.inf if promising and place < len(_near(left)) else ends
        if time.process_time() > ends or query.deadline.left() <= 0.0 or estimate.count in broken:
            why = f" ({broken[estimate.count]})" if estimate.count in broken else ""
            compared.left_out.append(f"{estimate.name}{why}")
            continue
        try:
            found = _compare(compared, shapes, estimate, below)
        except NotSeparable as reason:
            broken[estimate.count] = str(reason)
            compared.left_out.append(f"{estimate.name} ({reason})")
            continue
        if not found:
            compared.left_out.append(f"{estimate.name} (the constraints leave nothing there)")
            continue
        log.info(compared.tried[-1].text)
    for count in sorted({estimate.count for estimate in left}):
        _compare_unequal(compared, shapes.known(count), query, count, below)
    return compared


def in_order(left: Sequence[PipelineEstimate]) -> Iterator[PipelineEstimate]:
    """The estimates, best first; behind each the next ones with as many micro-batches, if they are about as good."""
    rest = list(left)
    while rest:
        near = _near(rest)
        yield from near
        rest = [estimate for estimate in rest if estimate not in near]


def _near(rest: Sequence[PipelineEstimate]) -> list[PipelineEstimate]:
    """The first estimate and those that are looked at with it."""
    first = rest[0]
    near = [
        estimate
        for estimate in rest
        if estimate.count == first.count and estimate.seconds <= LIMITS.together * first.seconds
    ]
    return near[: LIMITS.most_together]


def _estimated(left: Sequence[PipelineEstimate]) -> str:
    return ", ".join(f"{estimate.name} {format_seconds(estimate.seconds)}" for estimate in left[:SHOWN])


def _compare_unequal(compared: Compared, subs: Sequence[SubMesh], query: Query, count: int, below: float) -> None:
    """Stages on groups of different sizes, over everything that was solved for a number of micro-batches."""
    cluster = query.cluster
    if len({sub.table.devices for sub in subs}) < 2:
        return
    least = least_over_all_groups([sub.table for sub in subs], [cluster.num_devices], count)
    compared.least_seconds = min(compared.least_seconds, least)
    if least >= min(below, compared.step_seconds):
        return
    found = best_unequal(subs, [(cluster.num_devices, cluster.devices_per_node)], count)
    if found is None or len(found.subs) < 2 or found.pipeline.step_seconds >= min(below, compared.step_seconds):
        return
    sizes = ", ".join(str(sub.table.devices) for sub in found.subs)
    step = format_seconds(found.pipeline.step_seconds)
    name = f"groups of {sizes}, {count} micro-batches"
    compared.tried.insert(0, ComparedPipeline(name, f"{found.pipeline.family} {step}", found.pipeline.step_seconds))
    compared.best = found


def _compare(compared: Compared, shapes: SubMeshes, estimate: PipelineEstimate, below: float) -> bool:
    """One estimate: with the cheapest layouts of its mesh, and where these do not fit with those of the usual names;
    False where the constraints leave nothing on the mesh."""
    outcomes = _compare_meshes(compared, shapes, estimate, [estimate.mesh], below)
    if not outcomes:
        return False
    if outcomes[0].does_not_fit:
        named = [replace(estimate.mesh, axis_names=names) for names in USUAL_NAMES.get(len(estimate.mesh.shape), ())]
        outcomes = _compare_meshes(compared, shapes, estimate, named, below) or outcomes
        if compared.best is None and all(outcome.does_not_fit for outcome in outcomes):
            outcomes = [_compare_spans(compared, shapes, estimate, below)]
    compared.tried.append(min(outcomes, key=_by_step))
    return True


def _compare_spans(compared: Compared, shapes: SubMeshes, estimate: PipelineEstimate, below: float) -> ComparedPipeline:
    """The same with spans of blocks in the stages."""
    sub = shapes.on_mesh(estimate.count, estimate.mesh)
    assert sub is not None
    families = _families(sub, estimate.groups)
    spans = with_spans(
        shapes.query, sub.query, sub.solved, sub.runs, sub.table, estimate.groups, estimate.count, families
    )
    if spans is None or spans.pipeline is None:
        return ComparedPipeline(estimate.name, DOES_NOT_FIT)
    return _noted(compared, replace(sub, solved=spans.solved, runs=spans.runs), estimate, spans.pipeline, below)


def _compare_meshes(
    compared: Compared, shapes: SubMeshes, estimate: PipelineEstimate, meshes: Sequence[Mesh], below: float
) -> list[ComparedPipeline]:
    """What came out on each mesh on which the constraints leave something."""
    subs = [shapes.on_mesh(estimate.count, mesh) for mesh in meshes]
    return [_compare_on(compared, sub, estimate, below) for sub in subs if sub is not None]


def _compare_on(compared: Compared, sub: SubMesh, estimate: PipelineEstimate, below: float) -> ComparedPipeline:
    """One sub-mesh: its bound, and the best of its schedules where that may be below, and shorter than the best one."""
    groups, count = estimate.groups, estimate.count
    least = min(least_step_seconds(table, groups, count) for table in sub.tables)
    compared.least_seconds = min(compared.least_seconds, least)
    if least >= min(below, compared.step_seconds):
        return ComparedPipeline(estimate.name, f"at least {format_seconds(least)}", bound_seconds=least)
    try:
        found = try_tables(sub.tables, groups, count, _families(sub, groups))[0].pipeline
    except ConfigurationError as reason:
        return ComparedPipeline(estimate.name, str(reason))
    if found is None:
        return ComparedPipeline(estimate.name, DOES_NOT_FIT, bound_seconds=least)
    return _noted(compared, sub, estimate, found, below, least)


def _families(sub: SubMesh, groups: int) -> list[str]:
    """The schedules that are compared, as far as the blocks fill their stages."""
    return [name for name in QUICK if name not in ("zb-v", "interleaved") or 2 * groups <= sub.table.num_blocks]


def _noted(
    compared: Compared,
    sub: SubMesh,
    estimate: PipelineEstimate,
    found: Pipeline,
    below: float,
    least: float | None = None,
) -> ComparedPipeline:
    """What a pipeline came to; it is the best one where it is."""
    if found.step_seconds < min(below, compared.step_seconds):
        compared.best = found, sub
    outcome = f"{found.family} {format_seconds(found.step_seconds)}"
    return ComparedPipeline(estimate.name, outcome, found.step_seconds, least)


def write_compared(query: Query, compared: Compared) -> Plan | None:
    """The plan of the best pipeline, the others as alternatives. Raises ConfigurationError where the runtime cannot
    cut the model so, and InfeasibleError where stages cannot recompute each in its own way."""
    if compared.best is None:
        return None
    if isinstance(compared.best, Unequal):
        first = compared.best.subs[0]
        check_cut(first.query, first.runs, compared.best.pipeline)
        plan = unequal_plan(compared.best, compared.least_seconds, query.cluster.name)
        return replace(plan, alternatives=_others_compared(compared))
    pipeline, sub = compared.best
    check_cut(sub.query, sub.runs, pipeline)
    plan = pipeline_plan(sub.query, sub.solution, sub.solved, sub.runs, pipeline, compared.least_seconds)
    return replace(plan, cluster=query.cluster.name, alternatives=_others_compared(compared))


def what_was_compared(compared: Compared) -> list[str]:
    """Notes: the pipelines and their steps or bounds, and what was left out."""
    notes = []
    if compared.tried:
        more = len(compared.tried) - SHOWN
        tried = sorted(compared.tried, key=_by_step)
        shown = "; ".join(one.text for one in tried[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
        notes.append(
            f"pipelines compared ({', '.join(QUICK)}; layouts of the plan of a sub-mesh): {shown}. None of them takes "
            f"less than {format_seconds(compared.least_seconds)}, with any cut and schedule"
        )
    if compared.left_out:
        more = len(compared.left_out) - SHOWN
        shown = ", ".join(compared.left_out[:SHOWN]) + (f", and {more} more" if more > 0 else "")
        notes.append(f"pipelines not compared: {shown}")
    return notes


def _others_compared(compared: Compared) -> tuple[Baseline, ...]:
    """The pipelines beside the best one, fastest first, as alternatives of its plan."""
    tried = sorted(compared.tried, key=_by_step)
    return tuple(
        Baseline(
            name=f"pipeline {one.name}",
            dims={},
            objective_seconds=one.step_seconds,
            bound_seconds=one.bound_seconds,
            error=one.outcome if one.step_seconds is None and one.bound_seconds is None else None,
        )
        for one in tried
        if one.step_seconds is None or one.step_seconds > compared.step_seconds
    )


def _by_step(one: ComparedPipeline) -> tuple[float, float]:
    infinity = math.inf
    return (
        infinity if one.step_seconds is None else one.step_seconds,
        infinity if one.bound_seconds is None else one.bound_seconds,
    )
