"""How many micro-batches: one where memory does not bind, else the number whose best plan costs least.

    limit 80 GB:  1 part needs recomputation, 412 ms;  2 parts fit without, 396 ms  ->  2
    limit 60 GB:  1 part does not fit;  2 parts 431 ms;  4 parts 402 ms             ->  4

Costs never fall with the number of parts as long as memory is no matter, so numbers are tried in rising order, from the
first on which memory binds to the first on which it does not, and no further than the needed memory falls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autopar.errors import ConfigurationError
from autopar.planner.batch_flow import NotSeparable
from autopar.planner.choose_mesh import Chosen
from autopar.planner.factorisation import Factorisation
from autopar.planner.leaves import StateBytes
from autopar.planner.micro_batches import AtBatch, batch_size, in_parts
from autopar.planner.query import Progress, Query
from autopar.planner.shortage import DoesNotFit
from autopar.planner.targets import find_wishes
from autopar.program import MicroProgram

LEAST_GAIN = 0.02
"""More parts are tried only while they need at least this share less memory than the number before."""


def choose_micro_batches(
    query: Query, count: int | None, at_batch: AtBatch | None, choose: Callable[[Query], Chosen], log: Progress
) -> Chosen:
    """What `choose` finds for the best number of micro-batches, or for `count` of them.

    at_batch: captures the program at another size of the batch; None: one part only. Raises ConfigurationError where
    the program cannot run in `count` parts.
    """
    if count is not None and count != 1:
        return choose(_pinned(query, count, at_batch))
    chosen = choose(query)
    if count == 1 or at_batch is None or not _memory_binds(chosen):
        return chosen
    try:
        return _search(micro_batch_queries(query, at_batch), chosen, choose, log)
    except NotSeparable as reason:
        log(f"one micro-batch only: {reason}")
        return replace(chosen, notes=(*chosen.notes, f"memory is short, and the batch stays whole: {reason}"))


def micro_batch_queries(query: Query, at_batch: AtBatch) -> Iterator[Query]:
    """The query in 2, 3, 4, ... parts of its batch, for every divisor. Raises NotSeparable before the first one where
    the program cannot run in parts; a divisor at which the model computes another graph is left out."""
    size = batch_size(query.program) or 1
    yielded = False
    refusal = NotSeparable("the inputs have no common batch")
    for count in range(2, size + 1):
        if size % count:
            continue
        try:
            micro = in_parts(query.program, count, at_batch, query.factorisation)
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
    factorisation = Factorisation(micro.program)
    return replace(
        query,
        program=micro.program,
        factorisation=factorisation,
        wishes=find_wishes(micro.program, query.constraints, factorisation),
        state_bytes={name: _with_total(state) for name, state in query.state_bytes.items()},
        micro=micro,
    )


def _with_total(state: StateBytes) -> StateBytes:
    return replace(state, optimizer=state.optimizer + state.gradient, gradient=0.0)


def _pinned(query: Query, count: int, at_batch: AtBatch | None) -> Query:
    if at_batch is None:
        raise ConfigurationError(f"micro_batches={count} needs the model at another batch; pass at_batch")
    try:
        return in_parts_of(query, in_parts(query.program, count, at_batch, query.factorisation))
    except NotSeparable as reason:
        raise ConfigurationError(f"micro_batches={count}: {reason}; pass micro_batches=1") from reason


def _search(queries: Iterator[Query], chosen: Chosen, choose: Callable[[Query], Chosen], log: Progress) -> Chosen:
    needed = _needed_bytes(chosen)
    for query in queries:
        assert query.micro is not None
        log(f"memory binds: trying {query.micro.count} micro-batches")
        found = choose(query)
        if found.best is not None:
            if chosen.best is None or found.best.plan.objective_seconds < chosen.best.plan.objective_seconds:
                chosen = found
            if not _memory_binds(found):
                break
        elif needed is not None and (now := _needed_bytes(found)) is not None:
            if now > needed * (1 - LEAST_GAIN):
                break
            needed = now
        if query.deadline.left() <= 0:
            break
    return chosen


def _memory_binds(chosen: Chosen) -> bool:
    """Whether nothing fits, or the best plan is not what it would be without a limit."""
    if chosen.best is None:
        return _needed_bytes(chosen) is not None
    return any(variable.availability is not None for variable in chosen.best.built.variables)


def _needed_bytes(chosen: Chosen) -> float | None:
    """The least memory with which something would have fitted; None where memory is not what failed."""
    return min((error.needed_bytes for error in chosen.failures if isinstance(error, DoesNotFit)), default=None)
