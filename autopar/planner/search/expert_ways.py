"""Every lossless way of products of experts over an axis `ep`, where nobody asked for one: each is planned, and the
shortest played step is the answer.

    dims={"ep": 4}      dispatch 24.1 ms, gather 31.7 ms, masked 58.0 ms      ->  the plan of dispatch, with a note

The solver could choose for every product by itself, but what travels is priced for a layer whose products agree
(`expert_exchanges.py`): a lone product among others would send more than its price says.

Under a load that is not even (`expert_load=`), dispatch is planned with copies of the 1, 2, 4, ... busiest experts on
every rank, too, for as long as the step becomes shorter:

    no copies 24.1 ms, 1 of each layer 19.3 ms, 2 17.9 ms, 4 18.2 ms     ->  2 of each layer
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import AutoparError
from autopar.graphs.expert_loads import expert_counts
from autopar.planner.one_mesh.query import Query
from autopar.planner.solver.solution import relative_gap
from autopar.plans.parallel_plan import Plan
from autopar.plans.parallelism import expert_way
from autopar.plans.plan_text import format_seconds
from autopar.request.axis_ways import LOSSLESS_WAYS, ExpertParallelism
from autopar.request.mesh_axes import EXPERT_AXIS
from autopar.request.replicated_experts import busiest_experts

log = logging.getLogger(__name__)


def planned_in_every_expert_way(search: Callable[[Query], Plan], dims: Mapping[str, Any] | None, query: Query) -> Plan:
    """The plan that a search finds for named axes; over an axis `ep` for which no way was asked, the one of the way
    whose step is shortest. Raises what the search of the first way raises where none has a plan."""
    is_named = (dims or {}).get(EXPERT_AXIS, 1) != 1  # -1 fills
    if not is_named or not expert_counts(query.program.graph):
        return search(query)
    if query.constraints.ep is not None:
        return _in_one_way(search, query)
    found: dict[ExpertParallelism, Plan] = {}
    first: AutoparError | None = None
    for way in LOSSLESS_WAYS:
        if way in found or (found and not query.deadline.left() > 0):
            continue
        log.info("products of experts over %s: planning %s", EXPERT_AXIS, way)
        try:
            plan = _in_one_way(search, replace(query, constraints=replace(query.constraints, ep=way)))
        except AutoparError as why:
            log.info("%s cannot be planned: %s", way, why)
            first = first or why
            continue
        found.setdefault(expert_way(plan) or way, plan)  # where a way cannot run, another one does
    if first is not None and not found:
        raise first
    return _shortest(found)


def _in_one_way(search: Callable[[Query], Plan], query: Query) -> Plan:
    """The plan that a search finds for one way; where rows travel and the load is not even, that of the shortest step
    over numbers of replicated experts."""
    plan, number = search(query), 1
    uneven = {module: shares for module, shares in query.expert_load.items() if len({*shares}) > 1}
    if not query.replicas_are_free or not uneven or expert_way(plan) != "dispatch":
        return plan
    found = {0: plan}
    while 2 * number <= max(map(len, uneven.values())) and query.deadline.left() > 0:
        log.info("products of experts over %s: planning copies of %d", EXPERT_AXIS, number)
        copies = {module: busiest_experts(shares, number) for module, shares in uneven.items()}
        try:
            found[number] = search(query.replicating(copies))
        except AutoparError as why:
            log.info("%d copies cannot be planned: %s", number, why)
            break
        if not found[number].predicted.step_seconds < found[number // 2].predicted.step_seconds:
            break
        number *= 2
    best = min(found, key=lambda one: found[one].predicted.step_seconds)
    said = [f"{one or 'none'} {format_seconds(each.predicted.step_seconds)}" for one, each in found.items()]
    note = f"experts of which every rank has a copy: {best or 'none'} of each layer ({', '.join(said)})"
    return replace(found[best], notes=(*found[best].notes, note)) if len(found) > 1 else plan


def _shortest(found: Mapping[ExpertParallelism, Plan]) -> Plan:
    """The plan of the shortest step, with the bound of all ways."""
    best = min(found, key=lambda way: found[way].predicted.step_seconds)
    if len(found) == 1:
        return found[best]
    steps = ", ".join(f"{way} {format_seconds(each.predicted.step_seconds)}" for way, each in found.items())
    note = f"products of experts over {EXPERT_AXIS}: {best} has the shortest step ({steps})"
    chosen, bound = found[best], min(each.bound_seconds for each in found.values())
    gap = relative_gap(chosen.objective_seconds, bound)
    return replace(chosen, bound_seconds=bound, gap=gap, notes=(*chosen.notes, note))
