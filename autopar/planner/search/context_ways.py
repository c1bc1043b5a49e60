"""A ring beside what else an axis `cp` may do: the solver hides a ring behind its blocks, and gathers behind nothing.

A ring's price is what shows of its hops (`Prices.ring_seconds`), that of a gather or of an all-to-all is whole. The
lowered program starts these early, too, so the played steps may stand the other way round: 4,096 tokens on four ranks
at 200 Mbit/s, ring 0.97 s and gathered keys 0.88 s. Where a ring was chosen freely, the best plan without one is
searched as well, and the shorter played step is the answer. Prices count gathers and all-to-alls alike, so that one
search chooses between them (Llama-3-8B, 8 x 8,192 tokens, `dp_shard=2`, `cp=4` on 8 H100: gathered keys, 1.3 % above
Ulysses). Where a search ends with a gap, as under a short limit of memory, or without a plan, the ring is searched by
itself, too, which has fewer layouts. With a small gap no way by itself is shorter: 524,288 tokens, gap 0.3 %, 84.1 s
freely, 84.8 s as a ring, 94.1 s as Ulysses, 84.9 s with gathered keys, at 540 CPU s. Where next to nothing of the
communication shows, no other way has much to win, and none is planned, but where processors pay for collectives
themselves: a ring has most of them (1,024 tokens at 1 Gbit/s: 0.38 s as a ring that shows nothing, 0.34 s with gathered
keys).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autopar.errors import AutoparError
from autopar.layouts.placement import Mesh
from autopar.planner.memory.shortage import SearchEnded
from autopar.planner.one_mesh.query import Query
from autopar.planner.problem.limits import LIMITS
from autopar.planner.solver.solution import relative_gap
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_seconds
from autopar.plans.plan_value import RING
from autopar.request.mesh_axes import CONTEXT_AXES

log = logging.getLogger(__name__)

FREE, WITHOUT_RINGS = "as chosen", "no ring"
"""The plan without a way that was asked for, and the one whose attention is no ring, in notes."""
SHOWS = 0.02
"""Part of a step that its communication must add for other ways to be planned, each at the cost of another search.
Llama-3-8B, 8 x 8,192 tokens on 8 H100: a ring shows 1.3 %, and Ulysses is 1.0 % shorter."""


def planned_the_other_ways_too(search: Callable[[Query], Plan], query: Query) -> Plan:
    """The plan that a search finds; or, where it has a ring on an axis `cp` that nobody asked for, the one of another
    way whose step is shorter."""
    try:
        plan = search(query)
    except SearchEnded as why:
        if query.constraints.cp is not None or not _has_context_axis(why.mesh):
            raise
        return _as_ring(search, query)
    if query.constraints.cp is not None or not _has_ring(plan):
        return plan
    predicted, ended_early = plan.predicted, plan.gap > LIMITS.open_gap
    hides = predicted.exposed_communication_seconds < SHOWS * predicted.step_seconds
    if hides and not ended_early and not query.cluster.collective_host_seconds:
        return plan
    found: dict[str, Plan] = {FREE: plan}
    for way in (RING, WITHOUT_RINGS) if ended_early else (WITHOUT_RINGS,):
        if query.deadline.left() > 0:
            log.info("a ring was chosen: planning %s, too", way)
            try:
                found[way] = search(_in_way(query, way))
            except AutoparError as why:
                log.info("%s cannot be planned: %s", way, why)
    best = min(found, key=lambda way: found[way].predicted.step_seconds)
    if best == FREE:
        return plan
    steps = ", ".join(f"{way} {format_seconds(each.predicted.step_seconds)}" for way, each in found.items())
    note = f"attention over cp: {best} has the shortest step ({steps})"
    chosen = found[best]
    bound = min(chosen.bound_seconds, plan.bound_seconds)  # nobody asked for this way: the bound is that of all ways
    gap = relative_gap(chosen.objective_seconds, bound)
    return replace(chosen, bound_seconds=bound, gap=gap, notes=(*chosen.notes, note))


def _in_way(query: Query, way: str) -> Query:
    asked: dict[str, Any] = {"without_rings": True} if way == WITHOUT_RINGS else {"cp": way}
    return replace(query, constraints=replace(query.constraints, **asked))


def _as_ring(search: Callable[[Query], Plan], query: Query) -> Plan:
    """The plan with a ring, of fewer layouts, where a search of all ended without one. Its bound is that of rings."""
    log.info("no plan was found in time: planning a ring")
    plan = search(_in_way(query, RING))
    note = "attention over cp: a ring, as the search of all ways ended without a plan; the bound is that of rings"
    return replace(plan, notes=(*plan.notes, note))


def _has_ring(plan: Plan) -> bool:
    return _has_context_axis(plan.mesh) and RING in plan.implementations


def _has_context_axis(mesh: Mesh) -> bool:
    return any(name in CONTEXT_AXES for name in mesh.axis_names)
