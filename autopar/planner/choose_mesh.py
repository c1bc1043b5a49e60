"""Choose the mesh: the search over shapes (`mesh_search`), and what the plan says of the shapes that lost.

    chosen = choose_mesh(query, meshes, log)
    chosen.best                # the candidate with the smallest objective
    chosen.alternatives        # the best of every other mesh, or the bound by which it was dropped

Stages of a mesh: price it and solve it without a memory limit, a bound for every limit; then fit it under the limit.
Every shape of one and two axes is tried. Shapes of three and four axes are refinements: those of the best coarser
shapes come first, until the tables of all would pass a limit (`Refinements`). For shapes that are not tried, the bound
over all meshes is that of perfect work: N devices are at most N times as fast as one (`perfect_seconds`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.errors import InfeasibleError
from autopar.layout import Mesh
from autopar.parallel_plan import Baseline
from autopar.plan_text import format_seconds
from autopar.planner.axis_roles import axis_notes
from autopar.planner.constraints import Constraints
from autopar.planner.known_plans import as_baseline
from autopar.planner.mesh_search import Entry, Outcome, Stage, best_first
from autopar.planner.mesh_shapes import coarser, link_key
from autopar.planner.one_mesh import Candidate, fit, price, solve_free
from autopar.planner.query import Progress, Query
from autopar.planner.restrict import ImpossiblePlacement
from autopar.planner.solver import Problem
from autopar.planner.solver.deadline import Deadline

AXIS_GROWTH = 36
"""An axis multiplies the entries of the tables by about this: six choices per operator, on both sides of an edge."""
ALWAYS_TRIED = 2
"""Meshes of up to this many axes are all tried: their tables are small."""
SHOWN_MESHES = 4
"""The note on other meshes lists at most this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The best candidate over all meshes (None: `failures` say why), with alternatives, notes and statistics."""

    best: Candidate | None
    failures: tuple[Exception, ...]
    alternatives: tuple[Baseline, ...] = ()
    notes: tuple[str, ...] = ()
    statistics: Mapping[str, float | int | str] = field(default_factory=dict)


def choose_mesh(query: Query, meshes: Sequence[Mesh], log: Progress) -> Chosen:
    """Search the meshes within `query.search`. Expected failures of single meshes are collected, not raised."""
    if len(meshes) > 1:
        log(f"{len(meshes)} mesh shapes, {meshes[0].shape} to {meshes[-1].shape}")
    refinements = Refinements(query, meshes)
    outcome: Outcome[Mesh, Candidate] = best_first(
        {mesh: _stages(query, mesh, refinements, log) for mesh in meshes},
        seconds=query.search.meshes_seconds,
        clock=partial(_clock, query.deadline),
        failures=(InfeasibleError, ImpossiblePlacement),
        refuse=refinements.refusal,
        promise=refinements.promise,
    )
    failures = tuple(entry.error for entry in outcome.entries if entry.error is not None)
    for entry in outcome.entries:
        if entry.error is not None:
            log(f"mesh {entry.key.shape}: {entry.error}")
    if outcome.best is None or outcome.best.result is None:
        return Chosen(best=None, failures=failures)
    best = outcome.best.result
    roles = axis_notes(query.program, query.factorisation, query.cluster, best.mesh, best.built, best.solution)
    if len(meshes) == 1:
        return Chosen(best=best, failures=failures, notes=tuple(roles))
    return Chosen(
        best=best,
        failures=failures,
        alternatives=_alternatives(outcome),
        notes=(*roles, *_notes(outcome)),
        statistics=_statistics(query, outcome, meshes),
    )


def _clock(deadline: Deadline) -> float:
    """Seconds of this process, so that what is chosen does not depend on others who use the machine; all of them once
    the user's own limit is over or the search is stopped."""
    return math.inf if deadline.left() <= 0.0 else time.process_time()


class Refinements:
    """Which meshes of more than two axes are tried, and in which order.

    promise: the lowest bound of a coarser mesh, for every plan on that one is also a plan on the finer one. refusal:
    the entries of a mesh's tables are estimated from those of meshes with one axis less; once the estimates of all
    refined meshes would pass `search.table_entries`, no other is tried. Both are the same in every process.
    """

    def __init__(self, query: Query, meshes: Sequence[Mesh]) -> None:
        self._per_node, self._limit = query.cluster.devices_per_node, query.search.table_entries
        self._always = max(ALWAYS_TRIED, min(len(mesh.shape) for mesh in meshes))
        self._coarser = {mesh: coarser(mesh, self._per_node) for mesh in meshes if len(mesh.shape) > self._always}
        self._bounds: dict[object, float] = {}
        self._entries: dict[int, int] = {}
        self._expected = 0.0

    def record(self, mesh: Mesh, problem: Problem, bound: float) -> None:
        """Remember a solved mesh: its bound, and the entries of its tables, each once however many edges share it."""
        entries = sum({id(edge.costs): edge.costs.size for edge in problem.edges}.values())
        self._entries[len(mesh.shape)] = max(entries, self._entries.get(len(mesh.shape), 0))
        self._bounds[link_key(mesh, self._per_node)] = bound

    def promise(self, mesh: Mesh) -> float:
        """The lowest bound of a coarser mesh; 0 for those that are always tried."""
        if mesh not in self._coarser:
            return 0.0
        return min((self._bounds.get(key, math.inf) for key in self._coarser[mesh]), default=math.inf)

    def refusal(self, mesh: Mesh) -> str:
        """Why a mesh is left out; empty where it is tried, which counts its estimate."""
        num_axes = len(mesh.shape)
        if num_axes <= self._always:
            return ""
        fewer = self._entries.get(num_axes - 1)
        if fewer is None:
            return f"no mesh of {num_axes - 1} axes was"
        expected = float(fewer * AXIS_GROWTH)
        if self._expected + expected > self._limit:
            return f"their tables have about {expected:.0e} entries each, and {self._limit:.0e} are allowed in all"
        self._expected += expected
        return ""


def of_known(chosen: Chosen) -> Chosen:
    """The choice among the known plans, with a note that the free search did not find it."""
    if chosen.best is None:
        return chosen
    axes = "+".join(chosen.best.mesh.axis_names)
    note = f"the free search found nothing that fits: this is the optimum of the plans with the axes {axes}"
    return replace(chosen, notes=(*chosen.notes, note))


def perfect_seconds(query: Query) -> float:
    """A bound for every mesh: no operator takes less than a device alone divided by all devices, nothing is sent."""
    alone = replace(query, constraints=Constraints(), wishes=())
    problem = price(alone, Mesh(("one",), (1,))).problem
    return float(sum(costs.min() for costs in problem.node_costs)) / query.cluster.num_devices


def _stages(query: Query, mesh: Mesh, refinements: Refinements, log: Progress) -> Iterator[Stage[Candidate]]:
    built = price(query, mesh)
    free = solve_free(query, built, mesh)
    refinements.record(mesh, built.problem, free.lower_bound)
    log(f"mesh {mesh.shape}: at least {format_seconds(free.lower_bound)}")
    yield Stage(bound=free.lower_bound)
    candidate = fit(query, built, mesh, free, log)
    plan = candidate.plan
    yield Stage(bound=plan.bound_seconds, objective=plan.objective_seconds, result=candidate)


def _alternatives(outcome: Outcome[Mesh, Candidate]) -> tuple[Baseline, ...]:
    """The best of every other mesh that was tried, cheapest first: finished, dropped by its bound, or failed."""
    tried = [e for e in outcome.entries if e is not outcome.best and e.state not in ("untried", "refused")]
    found = []
    for entry in sorted(tried, key=lambda e: (min(e.objective, e.bound or e.objective), e.key.shape)):
        if entry.result is not None:
            found.append(replace(as_baseline(entry.result), bound_seconds=entry.bound))
            continue
        found.append(
            Baseline(
                name=f"mesh {_text(entry.key)}",
                dims=dict(zip(entry.key.axis_names, entry.key.shape, strict=True)),
                bound_seconds=entry.bound or None,
                error=None if entry.error is None else str(entry.error),
            )
        )
    return tuple(found)


def _notes(outcome: Outcome[Mesh, Candidate]) -> list[str]:
    """What became of the other meshes: bounds of those that were dropped, and why some were not tried."""
    notes = []
    dropped = sorted(
        (e for e in outcome.entries if e is not outcome.best and e.state in ("open", "finished")),
        key=lambda e: min(e.objective, e.bound),
    )
    if dropped:
        shown = [f"{_text(e.key)} {_known(e)}" for e in dropped[:SHOWN_MESHES]]
        more = f", and {len(dropped) - SHOWN_MESHES} more" if len(dropped) > SHOWN_MESHES else ""
        notes.append(f"other meshes: {', '.join(shown)}{more}")
    reasons: dict[tuple[int, str], int] = {}
    for entry in outcome.entries:
        if entry.state in ("untried", "refused"):
            reason = (len(entry.key.shape), entry.refusal or "the time limit came first")
            reasons[reason] = reasons.get(reason, 0) + 1
    notes += [
        f"{count} mesh shapes of {num_axes} axes were not tried: {reason}"
        for (num_axes, reason), count in reasons.items()
    ]
    return notes


def _known(entry: Entry[Mesh, Candidate]) -> str:
    if entry.state == "finished":
        return format_seconds(entry.objective)
    return f"at least {format_seconds(entry.bound)}"


def _statistics(
    query: Query, outcome: Outcome[Mesh, Candidate], meshes: Sequence[Mesh]
) -> dict[str, float | int | str]:
    """Counts of meshes, and the bound and gap over all of them, those included that were not tried."""
    assert outcome.best is not None
    states = [entry.state for entry in outcome.entries]
    bound = outcome.bound
    if any(entry.bound == 0.0 for entry in outcome.entries):
        floor = perfect_seconds(query)
        bound = min(min(max(entry.bound, floor), entry.objective) for entry in outcome.entries)
    return {
        "meshes": len(meshes),
        "meshes_not_tried": states.count("untried") + states.count("refused"),
        "meshes_dropped_by_bound": states.count("open") if not outcome.timed_out else 0,
        "bound_over_all_meshes_seconds": bound,
        "gap_over_all_meshes": 1.0 - bound / outcome.best.objective if outcome.best.objective else 0.0,
    }


def _text(mesh: Mesh) -> str:
    return "x".join(map(str, mesh.shape))
