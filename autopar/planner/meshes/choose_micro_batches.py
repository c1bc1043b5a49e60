"""How many micro-batches: one where memory does not bind, else the number whose best plan costs least.

    limit 80 GB:  1 part needs recomputation, 412 ms;  2 parts fit without, 396 ms  ->  2
    limit 60 GB:  1 part does not fit;  2 parts 431 ms;  4 parts 402 ms             ->  4
    played        2 parts take 380 ms, 4 parts 395 ms                               ->  2

Costs never fall with the number of parts as long as memory is no matter: what a mesh costs in one part without a limit
bounds it for every number. So the numbers are tried in rising order, each on the meshes whose bound is below the best
plan so far, until there is none, and while nothing fits, no further than the needed memory falls:

    (8, 32) 90 ms at least, 120 ms under the limit;  (32, 8) 100 ms and fits     ->  2 parts are tried on (8, 32)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.errors import ConfigurationError
from autopar.layouts.placement import Mesh
from autopar.planner.batch.batch_flow import NotSeparable
from autopar.planner.batch.micro_batch_program import Recapture
from autopar.planner.memory.resident_states import with_totals
from autopar.planner.memory.shortage import DoesNotFit
from autopar.planner.meshes.choose_mesh import Chosen, choose_mesh
from autopar.planner.meshes.contenders import Contender, Plain
from autopar.planner.one_mesh.query import Query
from autopar.planner.problem.constraint_targets import bind_constraints
from autopar.planner.problem.factorisation import Factorisation
from autopar.planner.problem.limits import LIMITS
from autopar.program import MicroProgram, batch_size

log = logging.getLogger(__name__)

WHOLE = {"dp_replicate", "tp"}
"""Axes along which no parameter is gathered."""


def choose_micro_batches(query: Query, meshes: Sequence[Mesh], contender: Contender | None = None) -> Chosen:
    """The best over the meshes, in the best number of micro-batches, or in as many as the user wants.

    contender: another answer than more parts; asked where more parts would be tried, which must then be faster.
    Raises ConfigurationError where the program cannot run in as many parts as it should.
    """
    count = query.micro_batches
    if count is not None and count != 1:
        return _both_ways(query_in_parts(query, count), meshes, contender=contender)
    chosen = choose_mesh(query, meshes, contender=contender)
    if count == 1 or query.recapture is None or not _hopeful(chosen, _objective(chosen)):
        return chosen
    below = math.inf
    if contender is not None:
        below = contender.step_before("more parts", None if chosen.best is None else Plain.of(chosen.best.plan))
    if not _hopeful(chosen, min(below / LIMITS.parts_must_promise, _objective(chosen))):
        return chosen
    try:
        return _search(micro_batch_queries(query, query.recapture), chosen, meshes, below, contender)
    except NotSeparable as reason:
        log.info(f"one micro-batch only: {reason}")
        return replace(chosen, notes=(*chosen.notes, f"memory is short, and the batch stays whole: {reason}"))


def micro_batch_queries(query: Query, recapture: Recapture) -> Iterator[Query]:
    """The query in 2, 3, 4, ... parts of its batch, for every divisor. Raises NotSeparable before the first one where
    the program cannot run in parts; a divisor at which the model computes another graph is left out."""
    size = batch_size(query.program) or 1
    yielded = False
    refusal = NotSeparable("the inputs have no common batch")
    for count in range(2, size + 1):
        if size % count:
            continue
        try:
            micro = query.in_parts(count, recapture)
        except NotSeparable as reason:
            if not yielded and refusal.args[0] == reason.args[0]:
                break
            refusal = reason
            continue
        yielded = True
        yield in_parts_of(query, micro)
    if not yielded:
        raise refusal


def in_parts_of(query: Query, micro: MicroProgram) -> Query:
    """The same question about a program in parts; the totals of gradients live as long as the optimizer state."""
    factorisation = query.kept.factorisations.recall(micro.program, lambda: Factorisation(micro.program))
    return replace(
        query,
        program=micro.program,
        factorisation=factorisation,
        bound_constraints=bind_constraints(micro.program, query.constraints, factorisation),
        state_bytes={
            name: with_totals(state, micro.count, query.shards is not None) for name, state in query.state_bytes.items()
        },
        micro=micro,
        recapture=None,
    )


def query_in_parts(query: Query, count: int) -> Query:
    """The question about the program in `count` parts; itself for one. Raises ConfigurationError where it cannot run
    so."""
    if count == 1:
        return query
    if query.recapture is None:
        raise ConfigurationError(f"micro_batches={count} needs the model at another batch; pass a recapture")
    try:
        return in_parts_of(query, query.in_parts(count, query.recapture))
    except NotSeparable as reason:
        raise ConfigurationError(f"micro_batches={count}: {reason}; pass micro_batches=1") from reason


def _search(
    queries: Iterator[Query], chosen: Chosen, meshes: Sequence[Mesh], below: float, contender: Contender | None
) -> Chosen:
    """Sums of costs bound what more parts may win; of what was found, the shortest played step is the answer."""
    needed, floors, shortest = _needed_bytes(chosen), chosen.free_bounds, chosen
    for query in queries:
        assert query.micro is not None
        objective = min(_objective(chosen), below)
        log.info(f"memory binds: trying {query.micro.count} micro-batches")
        found = _both_ways(query, meshes, floors, objective, contender)
        if found.best is not None:
            chosen, shortest = found, min(found, shortest, key=_step_seconds)
        elif chosen.best is None:
            now = _needed_bytes(found)
            if needed is None or now is None or now > needed * (1 - LIMITS.parts_least_relief):
                break
            needed = now
        floors = {mesh: max(floor, found.free_bounds.get(mesh, 0.0)) for mesh, floor in floors.items()}
        if query.deadline.left() <= 0 or not _hopeful(
            replace(chosen, free_bounds=floors), min(_objective(chosen), below)
        ):
            break
    return shortest


def _both_ways(
    query: Query,
    meshes: Sequence[Mesh],
    floors: Mapping[Mesh, float] | None = None,
    below: float = math.inf,
    contender: Contender | None = None,
) -> Chosen:
    """`choose_mesh` with parameters gathered in every part, and once per step: the shorter step of what fits. Bounds of
    meshes are those of what costs less."""
    each = choose_mesh(query, meshes, floors, below, contender)
    is_whole = query.shards is not None or all(set(mesh.axis_names) <= WHOLE for mesh in meshes)
    if is_whole or query.deadline.left() <= 0:
        return each
    once = choose_mesh(replace(query, gather_once=True), meshes, floors, below, contender)
    best = once if _is_shorter(once, each) else each
    bounds = {mesh: min(bound, once.free_bounds.get(mesh, bound)) for mesh, bound in each.free_bounds.items()}
    others = [other for chosen in (each, once) for other in (chosen.best, *chosen.others) if other is not None]
    others = [other for other in others if other is not best.best and other.plan.gather_once == _gathers_once(best)]
    return replace(best, free_bounds={**once.free_bounds, **bounds}, others=tuple(others))


def _gathers_once(chosen: Chosen) -> bool:
    return chosen.best is not None and chosen.best.plan.gather_once


def _is_shorter(chosen: Chosen, other: Chosen) -> bool:
    if chosen.best is None or other.best is None:
        return other.best is None and chosen.best is not None
    return chosen.best.plan.predicted.step_seconds < other.best.plan.predicted.step_seconds


def _step_seconds(chosen: Chosen) -> float:
    """The shortest one that was played."""
    played = [each for each in (chosen.best, *chosen.others) if each is not None]
    return min((each.plan.predicted.step_seconds for each in played), default=math.inf)


def _objective(chosen: Chosen) -> float:
    return math.inf if chosen.best is None else chosen.best.plan.objective_seconds


def _hopeful(chosen: Chosen, below: float) -> bool:
    """Whether some mesh that was solved would cost less than this in more parts, as far as is known."""
    return any(bound < below * (1 - LIMITS.parts_least_saved) for bound in chosen.free_bounds.values())


def _needed_bytes(chosen: Chosen) -> float | None:
    """The least memory with which something would have fitted; None where memory is not what failed."""
    return min((error.needed_bytes for error in chosen.failures if isinstance(error, DoesNotFit)), default=None)
