"""Every lossless way of products of experts over an axis `ep`, where nobody asked for one: each is planned, and the
shortest played step is the answer.

    dims={"ep": 4}      dispatch 24.1 ms, gather 31.7 ms, masked 58.0 ms      ->  the plan of dispatch, with a note

The solver could choose for every product by itself, but what travels is priced for a layer whose products agree
(`expert_exchanges.py`): a lone product among others would send more than its price says.
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

log = logging.getLogger(__name__)


def planned_in_every_expert_way(search: Callable[[Query], Plan], dims: Mapping[str, Any] | None, query: Query) -> Plan:
    """The plan that a search finds for named axes; over an axis `ep` for which no way was asked, the one of the way
    whose step is shortest. Raises what the search of the first way raises where none has a plan."""
    is_named = (dims or {}).get(EXPERT_AXIS, 1) != 1  # -1 fills
    if query.constraints.ep is not None or not is_named or not expert_counts(query.program.graph):
        return search(query)
    found: dict[ExpertParallelism, Plan] = {}
    first: AutoparError | None = None
    for way in LOSSLESS_WAYS:
        if way in found or (found and not query.deadline.left() > 0):
            continue
        log.info("products of experts over %s: planning %s", EXPERT_AXIS, way)
        try:
            plan = search(replace(query, constraints=replace(query.constraints, ep=way)))
        except AutoparError as why:
            log.info("%s cannot be planned: %s", way, why)
            first = first or why
            continue
        found.setdefault(expert_way(plan) or way, plan)  # where a way cannot run, another one does
    if first is not None and not found:
        raise first
    return _shortest(found)


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
