"""Climbed rungs: the memory ladder of a plan, counted in its lowered program and played.

    ladder_of(step, held)        the ladder of one rank of the group that `held` is of; None where all is kept

What a rung costs is the difference of two played steps: as it is, and with what the program has for the sake of the
rung at no cost (`StepProgram.actions`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from autopar.cost_models.simulator import simulate
from autopar.explain.held_memory import HeldMemory
from autopar.explain.memory_ladder import MemoryLadder, Rung
from autopar.explain.memory_pieces import BROUGHT, BROUGHT_PARAMETERS, SAVED
from autopar.planner.memory.rungs import bytes_by_rung, in_order
from autopar.plans.rung_names import IN_SPANS, KEPT, ON_HOST, RECOMPUTED, STATES_ON_HOST
from autopar.simulation.step_program import StepProgram

RUNG_OF_KIND: Mapping[str, str] = {
    SAVED: KEPT,
    RECOMPUTED: RECOMPUTED,
    IN_SPANS: IN_SPANS,
    BROUGHT: ON_HOST,
    BROUGHT_PARAMETERS: STATES_ON_HOST,
}
"""Kind of a piece of memory -> the rung by which it came; other kinds that have the name of a rung are of it."""


def ladder_of(step: StepProgram, held: HeldMemory) -> MemoryLadder | None:
    """Of one rank; None where everything is kept on the device."""
    rungs = step.rungs
    if not rungs.are_several:
        return None
    on_host = held.states_on_host
    sizes: dict[str, float] = {}
    for stage in held.own:
        for rung, size in bytes_by_rung(rungs, stage.lowered.partition).items():
            sizes[rung] = sizes.get(rung, 0.0) + size
    sizes |= {STATES_ON_HOST: on_host} if on_host else {}
    at_peak = by_rung(held.pieces(held.fullest), sizes)
    played = simulate(step.actions(), step.beside).makespan_seconds
    moments = tuple((name, by_rung(pieces, sizes), on_host + waiting) for name, pieces, waiting in held.each_moment())
    return MemoryLadder(
        rungs=tuple(
            Rung(name=name, bytes=size, peak_bytes=at_peak.get(name, 0.0), seconds=_seconds(step, name, played))
            for name, size in in_order(sizes).items()
        ),
        over_time=moments,
        host_peak_bytes=max((size for _, _, size in moments), default=0.0),
        host_limit_bytes=_host_limit(held),
    )


def by_rung(pieces: Iterator[tuple[str, str, float]], known: Mapping[str, float]) -> dict[str, float]:
    """Bytes of pieces of memory by the rung by which they came; known: the rungs of the plan."""
    found: dict[str, list[float]] = {}
    for _, kind, size in pieces:
        rung = RUNG_OF_KIND.get(kind, kind)
        if rung in known:
            found.setdefault(rung, []).append(size)
    return in_order({rung: math.fsum(sizes) for rung, sizes in found.items()})


def _seconds(step: StepProgram, rung: str, played: float) -> float:
    if rung == KEPT:
        return 0.0
    return max(0.0, played - simulate(step.actions(free=rung), step.beside).makespan_seconds)


def _host_limit(held: HeldMemory) -> float | None:
    cluster = held.own[0].cluster
    return None if cluster.host is None else cluster.host.bytes_per_device(cluster.devices_per_node)
