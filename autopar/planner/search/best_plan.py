"""The best plan for a question: the search over meshes, and what competes with what it finds.

meshes, micro-batches       the optimum of a sum of costs (`choose_mesh`, `choose_micro_batches`)
nothing fits                from the baselines (`from_baselines`), else a pipeline, else why not
pipelines nobody asked for  several nodes, or memory short (`pipelines/free_pipelines`)
played steps                other sums and the baselines (`choose_step`): the shortest step is the answer
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError
from autopar.layouts.placement import Mesh
from autopar.planner.memory.shortage import DoesNotFit, Slower
from autopar.planner.meshes.baseline_plans import (
    KnownPlans,
    Shapes,
    baseline_meshes,
    baselines,
    cheapest,
    solved_baselines,
    usable,
)
from autopar.planner.meshes.choose_mesh import Chosen, choose_mesh
from autopar.planner.meshes.choose_micro_batches import choose_micro_batches, query_in_parts
from autopar.planner.meshes.choose_step import OtherSums, instead, shortest_step
from autopar.planner.meshes.from_baselines import at_least_as_good
from autopar.planner.meshes.hidden_first import HiddenFirst
from autopar.planner.one_mesh.query import Query
from autopar.planner.one_mesh.read_solution import switching_costs
from autopar.planner.pipelines.free_pipelines import FreePipelines, pipeline_instead
from autopar.planner.pipelines.repeated_blocks import blocks_of
from autopar.planner.problem.limits import LIMITS
from autopar.planner.search.suggestions import suggested
from autopar.plans.logical_shards import num_shards
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import Baseline
from autopar.request import Request
from autopar.request.constraints import Constraints


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question without stages. query: of the whole batch; meshes: to search; shapes: of the meshes on which a known
    plan is one that may be chosen (None: any). with_baselines: as of a request. tries_pipelines: whether stages may be
    the answer; began: CPU seconds of the process when it was asked."""

    query: Query
    meshes: Sequence[Mesh]
    shapes: Shapes | None
    with_baselines: bool
    tries_pipelines: bool
    began: float

    @staticmethod
    def of(request: Request, query: Query, meshes: Sequence[Mesh], began: float) -> Asked:
        """A request that asks for no stages."""
        is_free = request.mesh is None and not request.dims and request.micro_batches != 1
        is_free = is_free and not query.constraints.placements and not query.constraints.pinned and query.shards is None
        return Asked(
            query=query,
            meshes=meshes,
            shapes=shapes_of(request, query.constraints),
            with_baselines=request.with_baselines,
            tries_pipelines=is_free and query.search.tries_pipelines,
            began=began,
        )


def best_plan(asked: Asked) -> Plan:
    """The answer, but for what the question was. Raises ConfigurationError, and InfeasibleError where nothing fits."""
    query = asked.query
    known = KnownPlans(query, asked.shapes, asked.with_baselines)
    pipelines = FreePipelines(query, known, asked.began) if asked.tries_pipelines else None
    hidden = HiddenFirst(query, pipelines)
    chosen = hidden.better_of(choose_micro_batches(query, asked.meshes, hidden))
    if chosen.best is None and pipelines is not None and any(isinstance(why, Slower) for why in chosen.failures):
        pipeline = pipelines.instead(chosen)
        if pipeline is not None:
            return _with_known(asked, pipeline)
        chosen = choose_micro_batches(query, asked.meshes)
    failures: tuple[Exception, ...] = ()
    if chosen.best is None:
        chosen, failures = _from_known_meshes(asked, chosen)
    if chosen.best is None:
        return _with_stages(asked, chosen, failures)
    return _shortest(asked, chosen, pipelines, known, hidden.sums)


def shapes_of(request: Request, constraints: Constraints) -> Shapes | None:
    """Shapes of the meshes on which a baseline, which knows no constraints, may be chosen (None: any)."""
    if request.dims is not None or request.micro_batches not in (None, 1) or constraints != Constraints():
        return ()
    if num_shards(request.deterministic):
        return ()
    return None if request.mesh is None else (tuple(request.mesh),)


def _with_known(asked: Asked, pipeline: Plan) -> Plan:
    """A pipeline that is faster than every plan without stages, with the baselines that a part of the time finds."""
    query = asked.query
    quick = replace(query, search=query.search.in_part(LIMITS.time_share_if_shown))
    known = solved_baselines(quick, None) if asked.with_baselines else {}
    return replace(pipeline, baselines=baselines(query, known))


def _from_known_meshes(asked: Asked, chosen: Chosen) -> tuple[Chosen, tuple[Exception, ...]]:
    """What is found from the baselines where the search found nothing that fits, and why not more."""
    query = asked.query
    named = list(baseline_meshes(query.cluster, asked.shapes).values()) if query.search.tries_suggestions else []
    helper = choose_mesh(query, named) if named else Chosen(best=None, failures=())
    return at_least_as_good(query, chosen, helper.best), helper.failures


def _with_stages(asked: Asked, chosen: Chosen, failures: Sequence[Exception]) -> Plan:
    """A pipeline, where nothing fits without. Raises InfeasibleError where there is none either."""
    spent = time.process_time() - asked.began
    pipeline = None
    if asked.tries_pipelines:
        pipeline = pipeline_instead(asked.query, spent)
    if pipeline is None:
        raise _why_nothing_fits(asked, chosen, failures)
    return replace(pipeline, notes=(*pipeline.notes, f"without stages nothing fits: {chosen.failures[0]}"))


def _shortest(
    asked: Asked,
    chosen: Chosen,
    pipelines: FreePipelines | None,
    baseline_plans: KnownPlans,
    sums: OtherSums | None,
) -> Plan:
    """The shortest played step of what was chosen, the baselines, pipelines and other sums of costs. Pipelines that
    were compared by now come first, so that other sums are solved only where they may be shorter; else they come last.
    """
    query = asked.query
    assert chosen.best is not None
    known = baseline_plans.beside(chosen.best.plan, math.inf if pipelines is None else pipelines.step_seconds)
    chosen = at_least_as_good(query, chosen, cheapest(known, asked.shapes))
    assert chosen.best is not None
    plan = _finished(query, chosen, baselines(query, known) if asked.with_baselines else ())
    if pipelines is not None and pipelines.is_settled:
        plan, pipelines = pipelines.better_of(plan), None
    running = query_in_parts(query, chosen.best.plan.micro_batches)
    running = replace(running, gather_once=chosen.best.plan.gather_once)
    rivals = usable(known, asked.shapes) if running.micro is None else ()
    before = sums if running.micro is None else None
    shorter = shortest_step(running, chosen, rivals, plan.predicted.step_seconds, before)
    if shorter is not None:
        plan = instead(plan, _finished(query, shorter, ()))
    return plan if pipelines is None else pipelines.better_of(plan)


def _why_nothing_fits(asked: Asked, chosen: Chosen, more: Sequence[Exception]) -> Exception:
    """The failure that needs the least memory, with what would fit; the first one where memory is not what is short."""
    failures = (*chosen.failures, *more)
    short = [failure for failure in failures if isinstance(failure, DoesNotFit)]
    if not short:
        return failures[0]
    least = min(short, key=lambda failure: failure.needed_bytes)
    error = suggested(asked.query, least)
    return InfeasibleError(f"{error}. {'; '.join(chosen.notes)}") if chosen.notes else error


def _finished(query: Query, chosen: Chosen, known: tuple[Baseline, ...]) -> Plan:
    """The plan of the best candidate, with what is known beside it."""
    best = chosen.best
    assert best is not None
    blocks = blocks_of(query.program, query.factorisation)
    structure: Mapping[str, int] = {
        "blocks": blocks.num_blocks,
        "kinds_of_blocks": len(blocks.kinds),
        "cuts": len(blocks.cuts),
    }
    notes = [*best.plan.notes, *chosen.axis_notes, *chosen.notes]
    if query.deadline.left() <= 0.0:
        why = "Ctrl-C" if query.deadline.stop.pressed else "the time limit"
        notes.append(
            f"{why} ended the search: this is the best plan so far, with a gap of {best.plan.gap:.1e} on its mesh"
        )
    return replace(
        best.plan,
        notes=tuple(notes),
        statistics={**best.plan.statistics, **structure, **chosen.statistics},
        explanations=switching_costs(best.built, best.solution.assignment, best.plan.mesh),
        alternatives=chosen.alternatives,
        baselines=known,
    )
