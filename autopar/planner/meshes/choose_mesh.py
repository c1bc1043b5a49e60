"""Choose the mesh: the search over shapes (`mesh_search`), and what the plan says of the shapes that lost.

    chosen = choose_mesh(query, meshes)
    chosen.best                # the candidate with the smallest objective
    chosen.alternatives        # the best of every other mesh, or the bound by which it was dropped

What is known of one mesh, and how one serves another, is `solved_meshes.py`. Every shape of one and two axes is tried;
those of three and four axes are refinements, tried in the order of the coarser ones until the tables of all would pass
a limit or time is up. For shapes that are not tried, the bound over all meshes is that of perfect work: N devices are
at most N times as fast as one (`perfect_seconds`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.errors import InfeasibleError
from autopar.layouts.placement import Mesh
from autopar.planner.meshes.axis_roles import axis_notes
from autopar.planner.meshes.baseline_plans import as_baseline
from autopar.planner.meshes.contenders import Contender
from autopar.planner.meshes.least_memory import why_nothing_fits
from autopar.planner.meshes.mesh_search import Entry, MeshOutcome, best_first
from autopar.planner.meshes.solved_meshes import SolvedMeshes
from autopar.planner.one_mesh.mesh_plan import Candidate, price
from autopar.planner.one_mesh.query import Query
from autopar.planner.one_mesh.restrict import ImpossiblePlacement
from autopar.planner.solver.deadline import Deadline
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_seconds
from autopar.plans.plan_value import Baseline
from autopar.request.constraints import Constraints

log = logging.getLogger(__name__)

SHOWN_MESHES = 4
"""The note on other meshes lists at most this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The best candidate over all meshes (None: `failures` say why), with alternatives, notes and statistics;
    axis_notes: what each free axis of the best one does.
    free_bounds: of the meshes that were solved, whatever the memory limit. others: what was fitted beside the best."""

    best: Candidate | None
    failures: tuple[Exception, ...]
    alternatives: tuple[Baseline, ...] = ()
    axis_notes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    statistics: Mapping[str, float | int | str] = field(default_factory=dict)
    free_bounds: Mapping[Mesh, float] = field(default_factory=dict)
    others: tuple[Candidate, ...] = ()


def choose_mesh(
    query: Query,
    meshes: Sequence[Mesh],
    floors: Mapping[Mesh, float] | None = None,
    below: float = math.inf,
    contender: Contender | None = None,
) -> Chosen:
    """Search the meshes within `query.search`. Expected failures of single meshes are collected, not raised.

    floors: bounds in seconds that are known of meshes, and then only these are tried; below: only plans with a smaller
    objective count. contender: see `SolvedMeshes`.
    """
    hopeless = why_nothing_fits(query, meshes)
    if hopeless is not None:
        return Chosen(best=None, failures=(hopeless,))
    if len(meshes) > 1:
        log.info(f"{len(meshes)} mesh shapes, {meshes[0].shape} to {meshes[-1].shape}")
    solved = SolvedMeshes(query, meshes, floors, contender)
    outcome: MeshOutcome[Mesh, Plan] = best_first(
        meshes,
        solved,
        seconds=query.search.meshes_seconds,
        clock=partial(_clock, query.deadline),
        failures=(InfeasibleError, ImpossiblePlacement),
        floors=floors,
        below=below,
    )
    failures = tuple(entry.error for entry in outcome.entries if entry.error is not None)
    for entry in outcome.entries:
        if entry.error is not None:
            log.info(f"mesh {entry.key.shape}: {entry.error}")
    best = solved.best
    if outcome.best is None or best is None:
        return Chosen(best=None, failures=failures, free_bounds=solved.free_bounds)
    roles = roles_of(query, best)
    if len(meshes) == 1:
        return Chosen(
            best=best, failures=failures, axis_notes=roles, free_bounds=solved.free_bounds, others=solved.others
        )
    return Chosen(
        best=best,
        failures=failures,
        alternatives=_alternatives(outcome),
        axis_notes=roles,
        notes=tuple(_notes(outcome)),
        statistics=_statistics(query, outcome, meshes),
        free_bounds=solved.free_bounds,
        others=solved.others,
    )


def roles_of(query: Query, best: Candidate) -> tuple[str, ...]:
    """What each free axis of a candidate's mesh does, in words."""
    return tuple(axis_notes(query.program, query.factorisation, query.cluster, best.mesh, best.built, best.solution))


def _clock(deadline: Deadline) -> float:
    """Seconds of this process, so that what is chosen does not depend on others who use the machine; all of them once
    the user's own limit is over or the search is stopped."""
    return math.inf if deadline.left() <= 0.0 else time.process_time()


def perfect_seconds(query: Query) -> float:
    """A bound for every mesh: no operator takes less than a device alone divided by all devices, nothing is sent."""
    key, known = ("alone", query.cluster.fingerprint, query.kernel_backend), query.factorisation.derived
    seconds = known.get(key)
    if not isinstance(seconds, float):
        alone = replace(query, constraints=Constraints(), bound_constraints=())
        problem = price(alone, Mesh(("one",), (1,))).problem
        seconds = known[key] = float(sum(costs.min() for costs in problem.node_costs))
    return seconds / query.cluster.num_devices


def _alternatives(outcome: MeshOutcome[Mesh, Plan]) -> tuple[Baseline, ...]:
    """The best of every other mesh that was tried, cheapest first: finished, dropped by its bound, or failed."""
    tried = [e for e in outcome.entries if e is not outcome.best and not _is_unknown(e)]
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


def _notes(outcome: MeshOutcome[Mesh, Plan]) -> list[str]:
    """What became of the other meshes: bounds of those that were dropped, and why some were not tried."""
    notes = []
    dropped = sorted(
        (e for e in outcome.entries if e is not outcome.best and e.state != "failed" and not _is_unknown(e)),
        key=lambda e: min(e.objective, e.bound),
    )
    if dropped:
        shown = [f"{_text(e.key)} {_known(e)}" for e in dropped[:SHOWN_MESHES]]
        more = f", and {len(dropped) - SHOWN_MESHES} more" if len(dropped) > SHOWN_MESHES else ""
        notes.append(f"other meshes: {', '.join(shown)}{more}")
    reasons: dict[tuple[int, str], int] = {}
    for entry in outcome.entries:
        if _is_unknown(entry):
            reason = (len(entry.key.shape), entry.refusal or "the time limit came first")
            reasons[reason] = reasons.get(reason, 0) + 1
    notes += [
        f"{count} mesh shapes of {num_axes} axes were not tried: {reason}"
        for (num_axes, reason), count in reasons.items()
    ]
    return notes


def _is_unknown(entry: Entry[Mesh, Plan]) -> bool:
    """Whether it was not tried, and nothing else bounds it."""
    return entry.state == "refused" or (entry.state == "untried" and entry.bound == 0.0)


def _known(entry: Entry[Mesh, Plan]) -> str:
    if entry.state == "finished":
        return format_seconds(entry.objective)
    return f"at least {format_seconds(entry.bound)}"


def _statistics(query: Query, outcome: MeshOutcome[Mesh, Plan], meshes: Sequence[Mesh]) -> dict[str, float | int | str]:
    """Counts of meshes, and the bound and gap over all of them, those included that were not tried."""
    assert outcome.best is not None
    states = [entry.state for entry in outcome.entries]
    bound = outcome.bound
    if any(entry.bound == 0.0 for entry in outcome.entries):
        floor = perfect_seconds(query)
        bound = min(min(max(entry.bound, floor), entry.objective) for entry in outcome.entries)
    return {
        "meshes": len(meshes),
        "meshes_not_tried": sum(map(_is_unknown, outcome.entries)),
        "meshes_dropped_by_bound": states.count("open") if not outcome.timed_out else 0,
        "bound_over_all_meshes_seconds": bound,
        "gap_over_all_meshes": 1.0 - bound / outcome.best.objective if outcome.best.objective else 0.0,
    }


def _text(mesh: Mesh) -> str:
    return "x".join(map(str, mesh.shape))
