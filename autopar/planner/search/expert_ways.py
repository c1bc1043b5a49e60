"""Every lossless way of products of experts over an axis `ep`, where nobody asked for one: each is planned, and the
shortest played step is the answer.

    dims={"ep": 4}      dispatch 24.1 ms, gather 31.7 ms, masked 58.0 ms      ->  the plan of dispatch, with a note

Rows that travel may do so in two hops, where the axis goes across nodes and inside of them: it is cut there into `ep`
and `ep_inner` (`in_two_levels`), and both forms are planned:

    dims={"ep": 16} on two nodes of 8      dispatch over ep=16; two_level over ep=2 x ep_inner=8

The solver could choose for every product by itself, but what travels is priced for a layer whose products agree
(`expert_exchanges.py`): a lone product among others would send more than its price says.

Under a load that is not even (`expert_load=`), dispatch is planned with copies of the 1, 2, 4, ... busiest experts on
every rank, too, for as long as the step becomes shorter:

    no copies 24.1 ms, 1 of each layer 19.3 ms, 2 17.9 ms, 4 18.2 ms     ->  2 of each layer

The others are placed so that the busiest rank has few rows (`expert_places.py`), where the step is shorter then.

Where nobody named axes, the free search splits experts by gathers and sums only; dispatch over an axis `ep`, of all
devices or of those of a node, is planned beside it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from autopar.errors import AutoparError, ConfigurationError, InfeasibleError
from autopar.graphs.expert_loads import expert_counts
from autopar.hardware.cluster import Cluster, MixedCluster
from autopar.planner.one_mesh.query import Query
from autopar.planner.search.expert_places import experts_by_load, placement_note
from autopar.planner.solver.solution import relative_gap
from autopar.plans.expert_hops import INNER_EXPERT_AXIS
from autopar.plans.parallel_plan import Plan
from autopar.plans.parallelism import expert_way
from autopar.plans.plan_text import format_seconds
from autopar.request import Request
from autopar.request.axis_ways import LOSSLESS_WAYS, TRAVELLING, TWO_LEVEL, ExpertParallelism
from autopar.request.mesh_axes import EXPERT_AXES, EXPERT_AXIS
from autopar.request.replicated_experts import busiest_experts

FREE = "free axes"
"""What the search without an axis `ep` found, in notes."""
log = logging.getLogger(__name__)


def planned_in_every_expert_way(
    search: Callable[[Request, Query], Plan], request: Request, query: Query
) -> Plan:
    """The plan that a search finds as a request asks; over an axis `ep` for which no way was asked, and on free axes,
    the one of the way whose step is shortest. Raises what the first search raises where none has a plan."""
    is_named = (request.dims or {}).get(EXPERT_AXIS, 1) != 1  # -1 fills
    if not expert_counts(query.program.graph):
        return search(request, query)
    if not is_named:
        return _dispatch_beside(search, request, query)
    if query.constraints.ep is not None:
        return _in_way(search, request, query, query.constraints.ep)
    return _in_all_ways(search, request, query)


def _in_way(
    search: Callable[[Request, Query], Plan], request: Request, query: Query, way: ExpertParallelism
) -> Plan:
    """The plan that a search finds for one way. Raises ConfigurationError for two levels where the axis has one."""
    if way == TWO_LEVEL:
        request = replace(request, dims=in_two_levels(request.dims or {}, query.cluster))
    return _in_one_way(partial(search, request), replace(query, constraints=replace(query.constraints, ep=way)))


def in_two_levels(dims: Mapping[str, Any], cluster: Cluster) -> dict[str, Any]:
    """Named axes whose axis of experts is cut where nodes end. Raises ConfigurationError where it is not both across
    nodes and inside of them in equal parts."""
    if dims.get(INNER_EXPERT_AXIS, 1) != 1:
        return dict(dims)
    said = math.prod(size for size in dims.values() if isinstance(size, int) and size > 0)
    sizes = {name: cluster.num_devices // said if size == -1 else size for name, size in dims.items()}
    size, behind = sizes[EXPERT_AXIS], sizes.get("tp", 1)
    inside = 1 if isinstance(cluster, MixedCluster) else math.gcd(size, cluster.devices_per_node // behind)
    if inside in (1, size) or cluster.devices_per_node != inside * behind:
        raise ConfigurationError(
            f"ep={TWO_LEVEL!r}: ep={size} is not cut by the nodes of {cluster.name} into equal parts of several ranks; "
            f"name two axes, dims={{'ep': ..., {INNER_EXPERT_AXIS!r}: ...}}, or write ep='dispatch'"
        )
    return {**sizes, EXPERT_AXIS: size // inside, INNER_EXPERT_AXIS: inside}


def _dispatch_beside(search: Callable[[Request, Query], Plan], request: Request, query: Query) -> Plan:
    """The plan that a search finds; where axes are free, or that of rows that travel over an axis `ep`, if its step is
    shorter, or nothing else fits."""
    if not _may_name_axes(request, query):
        return search(request, query)
    found: dict[str, Plan] = {}
    first: InfeasibleError | None = None
    try:
        found[FREE] = search(request, query)
    except InfeasibleError as why:
        first = why
    for dims in _expert_dims(query):
        if not query.deadline.left() > 0:
            break
        log.info("planning rows of experts that travel over %s", dims)
        asked = replace(request, dims=dims, with_baselines=False)
        for way in TRAVELLING:
            try:
                candidate = _in_way(search, asked, query, way)
            except AutoparError as why:
                log.info("%s over %s cannot be planned: %s", way, dims, why)
                continue
            if expert_way(candidate) == way:
                found[_axes(candidate)] = candidate
    if first is not None and not found:
        raise first
    best = min(found, key=lambda name: found[name].predicted.step_seconds)
    if list(found) == [FREE]:
        return found[FREE]
    steps = ", ".join(f"{name} {format_seconds(each.predicted.step_seconds)}" for name, each in found.items())
    chosen, bound = found[best], min(each.bound_seconds for each in found.values())
    return replace(
        chosen,
        bound_seconds=bound,
        gap=relative_gap(chosen.objective_seconds, bound),
        baselines=found[FREE].baselines if FREE in found else (),
        alternatives=found[FREE].alternatives if FREE in found else (),
        notes=(*chosen.notes, f"rows of experts may travel: {best} has the shortest step ({steps})"),
    )


def _may_name_axes(request: Request, query: Query) -> bool:
    """Whether nothing was asked that speaks of axes or of how they are used."""
    free = request.dims is None and request.mesh is None and request.schedule is None and request.constraints is None
    return free and request.deterministic is not True and query.shards is None and _is_uniform(query.cluster)


def _is_uniform(cluster: Cluster) -> bool:
    return cluster.num_devices > 1 and not isinstance(cluster, MixedCluster)


def _expert_dims(query: Query) -> list[dict[str, int]]:
    """Named axes with one of experts: over all devices and over those of a node, or as many of them as have experts."""
    devices, fewest = query.cluster.num_devices, min(expert_counts(query.program.graph).values())
    sizes = {
        max(size for size in range(1, most + 1) if most % size == 0 and size <= fewest)
        for most in (query.cluster.devices_per_node, devices)
    } - {1}  # fmt: skip
    return [{"dp_shard": devices // size, EXPERT_AXIS: size} for size in sorted(sizes)]


def _axes(plan: Plan) -> str:
    """ "ep=8"; "ep=2 x ep_inner=4"."""
    sizes = zip(plan.layout_mesh.axis_names, plan.layout_mesh.shape, strict=True)
    return " x ".join(f"{name}={size}" for name, size in sizes if name in EXPERT_AXES)


def _in_all_ways(search: Callable[[Request, Query], Plan], request: Request, query: Query) -> Plan:
    """The plan of the way whose step is shortest."""
    found: dict[ExpertParallelism, Plan] = {}
    first: AutoparError | None = None
    for way in _ways_to_plan(request, query):
        if way in found or (found and not query.deadline.left() > 0):
            continue
        if way == TWO_LEVEL and "gather" in found:  # rows cannot travel
            continue
        log.info("products of experts over %s: planning %s", EXPERT_AXIS, way)
        try:
            plan = _in_way(search, request, query, way)
        except AutoparError as why:
            log.info("%s cannot be planned: %s", way, why)
            first = first or why
            continue
        runs_as = expert_way(plan) or way  # where a way cannot run, another one does
        if way != TWO_LEVEL or runs_as == way:
            found.setdefault(runs_as, plan)
    if first is not None and not found:
        raise first
    return _shortest(found)


def _ways_to_plan(request: Request, query: Query) -> Iterator[ExpertParallelism]:
    """The lossless ways that the axes of experts have: over two axes rows travel in two hops alone."""
    dims = request.dims or {}
    for way in LOSSLESS_WAYS:
        if way == TWO_LEVEL:
            with contextlib.suppress(ConfigurationError):
                in_two_levels(dims, query.cluster)
                yield way
        elif way != "dispatch" or dims.get(INNER_EXPERT_AXIS, 1) == 1:
            yield way


def _in_one_way(search: Callable[[Query], Plan], query: Query) -> Plan:
    """The plan that a search finds for one way; where rows travel and the load is not even, that of the shortest step
    over numbers of replicated experts, the others placed by load."""
    plan, number = search(query), 1
    uneven = {module: shares for module, shares in query.expert_load.items() if len({*shares}) > 1}
    if not uneven or expert_way(plan) not in TRAVELLING:
        return plan
    plan = _placed(search, query, plan, query.replicated_experts)
    if not query.replicas_are_free:
        return plan
    found = {0: plan}
    while 2 * number <= max(map(len, uneven.values())) and query.deadline.left() > 0:
        log.info("products of experts over %s: planning copies of %d", EXPERT_AXIS, number)
        copies = {module: busiest_experts(shares, number) for module, shares in uneven.items()}
        try:
            found[number] = _with_copies(search, query, plan, copies)
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


def _placed(
    search: Callable[[Query], Plan], query: Query, plan: Plan, copies: Mapping[str, tuple[int, ...]]
) -> Plan:
    """The plan with experts placed by load, where its step is shorter."""
    placed = experts_by_load(query, plan, copies) if query.order_is_free and query.deadline.left() > 0 else {}
    if not placed:
        return plan
    log.info("products of experts over %s: placing experts by load", EXPERT_AXIS)
    try:
        found = search(query.placing(copies, {module: each.order for module, each in placed.items()}))
    except AutoparError as why:
        log.info("placed experts cannot be planned: %s", why)
        return plan
    shorter = found.predicted.step_seconds < plan.predicted.step_seconds
    return replace(found, notes=(*found.notes, placement_note(placed))) if shorter else plan


def _with_copies(
    search: Callable[[Query], Plan], query: Query, plan: Plan, copies: Mapping[str, tuple[int, ...]]
) -> Plan:
    """As `plan`, and with copies of some experts; the others placed by load where these are."""
    placed = experts_by_load(query, plan, copies) if query.order_is_free and plan.expert_order else {}
    order = {module: each.order for module, each in placed.items()} or query.expert_order
    found = search(query.placing(copies, order))
    return replace(found, notes=(*found.notes, placement_note(placed))) if placed else found


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
