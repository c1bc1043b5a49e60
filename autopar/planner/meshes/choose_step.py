"""Choose by the played step: of the plans that the searches found, the one whose simulated step is the shortest.

    search                       sum of costs    played, with overlap
    everything counted           393 ms          403 ms
    half of the parameters'      287 ms          381 ms
    a tenth of them              233 ms          374 ms      <- taken: its reductions run beside backward
    DDP                          818 ms          598 ms

A sum of costs can be minimised exactly and proven, but it counts every collective as if the rank stood still. So the
plan that is best by the sum competes with those that the same search finds when communication of parameters counts
less (`hidden_communication.py`), and with the baselines; the simulator, which plays the lowered program, decides. The
bound and gap of the plan are those of the sum under which it was found, on its mesh.

A mesh is solved under a share only where its optimum may be below the shortest played step: solves under other shares
bound it (`hidden_bounds.py`), and a solve ends with its first bound above that step. That a plan whose sum under the
share is above a played step is not played faster itself holds where at most the share of its parameters' communication
hides and its collectives are joined no further than the sum counts them; elsewhere it is an estimate. What was played
is not played again, and one device has nothing to hide.

Where memory is short, other sums come first instead (`hidden_first.py`), and what they tried is not tried again. A
solve under the limit also ends where it cannot save `certified_gap` of the best sum of another mesh under the
same share: a rule, no proof, as equal sums may be played unequally. Nor is another sum or mesh tried behind a step of
which next to nothing is communication that shows (`least_exposed_share`).
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.layouts.placement import Mesh
from autopar.planner.meshes.choose_mesh import Chosen, roles_of
from autopar.planner.one_mesh.hidden_bounds import HiddenBounds
from autopar.planner.one_mesh.mesh_plan import Candidate, fit, hides_all, price, solve_free
from autopar.planner.one_mesh.query import Query
from autopar.planner.one_mesh.restrict import ImpossiblePlacement
from autopar.planner.problem.limits import LIMITS
from autopar.planner.problem.search_limits import Search
from autopar.planner.solver import Solution
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_seconds
from autopar.plans.plan_value import Baseline
from autopar.request.mesh_axes import BATCH_AXES

log = logging.getLogger(__name__)

NAMED = {*BATCH_AXES, "tp"}
"""A mesh of such axes only is a plan that somebody asked for: it is completed by the plain sum."""


def shortest_step(
    query: Query, chosen: Chosen, known: Sequence[Candidate], step_seconds: float, sums: OtherSums | None = None
) -> Chosen | None:
    """The plan whose played step is the shortest, where that is less than `step_seconds`; None where nothing is.

    query: of the program that runs, in its micro-batches. chosen: the best by the sum, with the bounds of the meshes
    that were solved. known: other candidates for the same question. sums: of it, where some were tried before.
    """
    limit = step_seconds * (1.0 - LIMITS.played_least_gain)
    best = _shortest([*chosen.others, *known], limit)
    sums = OtherSums(query, chosen.free_bounds) if sums is None else sums
    sums.played += [each for each in (chosen.best, *chosen.others) if each is not None]
    search = query.search.in_part(LIMITS.time_share_if_played)
    below = limit if best is None else _step(best)
    shown = best or chosen.best
    if shown is None or not hides_all(shown.plan.predicted):
        best = sums.shortest(query.search.hidden_shares, below, search, query.search.hidden_seconds) or best
    if best is None:
        return None
    log.info(f"played, mesh {best.mesh.shape} takes {_step(best) * 1e3:.1f} ms instead of {step_seconds * 1e3:.1f}")
    return replace(as_played(chosen, best), axis_notes=roles_of(query, best))


def as_played(chosen: Chosen, best: Candidate) -> Chosen:
    """The choice of a plan by its played step: notes and statistics say by which sum it was found."""
    return replace(chosen, best=best, notes=_notes(chosen, best), statistics=_statistics(chosen, best))


def played_freely(mesh: Mesh) -> bool:
    """Whether other sums are tried on a mesh: something is sent, and its axes leave layouts open."""
    return mesh.size > 1 and not set(mesh.axis_names) <= NAMED


class OtherSums:
    """The searches of one question under other sums, each of which is made once. query: of the program that runs, in
    its micro-batches. bounds: of the meshes that were solved under the plain sum, in seconds. played: candidates that
    need not be played again."""

    def __init__(self, query: Query, bounds: Mapping[Mesh, float]) -> None:
        self.query = query
        self.played: list[Candidate] = []
        self._bounds = HiddenBounds(bounds)
        self._meshes = _promising([mesh for mesh in bounds if played_freely(mesh)], bounds)
        self._sums: dict[float, float] = {}
        self._tried: set[tuple[float, Mesh]] = set()

    def shortest(self, shares: Sequence[float], below: float, search: Search, seconds: float) -> Candidate | None:
        """The candidate whose played step is the shortest, of those that are found under these shares; None where none
        is shorter than `below`. search: of one mesh; seconds: CPU seconds after which no other mesh is opened."""
        best: Candidate | None = None
        query, end = self.query, time.process_time() + seconds
        for share, mesh in itertools.product(shares, self._meshes):
            if time.process_time() > end or query.deadline.left() <= 0.0:
                break
            limit = below if best is None else below * (1.0 - LIMITS.played_least_gain)
            if (share, mesh) in self._tried or self._bounds.at_least(mesh, share) >= limit:
                continue
            self._tried.add((share, mesh))
            least = self._sums.get(share, math.inf)
            cheaper = min(limit, least * (1.0 - LIMITS.certified_gap))
            asked = replace(query, hidden_share=share, search=search, stop_above=cheaper)
            found = _found(asked, mesh, limit, self._bounds, self.played)
            if found is None:
                continue
            self._sums[share] = min(least, found.plan.objective_seconds)
            self.played.append(found)
            if _step(found) < below:
                best, below = found, _step(found)
                if hides_all(found.plan.predicted):
                    break
        return best


def instead(plan: Plan, shorter: Plan) -> Plan:
    """The plan with the shorter played step, with what was chosen before as an alternative."""
    name = "pipeline" if plan.in_stages else "smallest sum of costs"
    before = Baseline(
        name=name,
        dims=dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
        objective_seconds=plan.objective_seconds,
        bound_seconds=plan.bound_seconds,
        predicted=plan.predicted,
    )
    note = (
        f"chosen by its played step, {format_seconds(shorter.predicted.step_seconds)}: the {name} takes "
        f"{format_seconds(plan.predicted.step_seconds)} (sum {format_seconds(plan.objective_seconds)})"
    )
    return replace(
        shorter,
        baselines=plan.baselines,
        alternatives=(before, *plan.alternatives),
        notes=(*shorter.notes, note),
    )


def _shortest(candidates: Sequence[Candidate], below: float) -> Candidate | None:
    return min((each for each in candidates if _step(each) < below), key=_step, default=None)


def _promising(meshes: Sequence[Mesh], bounds: Mapping[Mesh, float]) -> list[Mesh]:
    """Those with the smallest sums, but for meshes whose sum is no smaller than that of one with fewer axes: what more
    axes do not make cheaper is solved on the smaller problem."""
    found: list[Mesh] = []
    for mesh in sorted(meshes, key=lambda mesh: (len(mesh.shape), bounds[mesh], mesh.shape)):
        fewer = [bounds[other] for other in found if len(other.shape) < len(mesh.shape)]
        least = min(fewer, default=math.inf) * (1.0 - LIMITS.certified_gap)
        if len(mesh.shape) <= LIMITS.axes_always_tried or bounds[mesh] < least:
            found.append(mesh)
    return sorted(found, key=lambda mesh: (bounds[mesh], mesh.shape))[: LIMITS.hidden_meshes]


def _found(
    query: Query, mesh: Mesh, below: float, bounds: HiddenBounds, played: Sequence[Candidate]
) -> Candidate | None:
    """The optimum on a mesh under the share of the query, played; None where its sum is above `below`, where it was
    played before, or where nothing fits."""
    try:
        built = price(query, mesh)
        free = solve_free(query, built, mesh, stop_above=below)
        bounds.learn(mesh, query.hidden_share, free.lower_bound)
        if free.lower_bound >= below or any(_is_same(each, mesh, free) for each in played):
            return None
        is_refined = len(mesh.shape) > LIMITS.axes_always_tried
        return fit(query, built, mesh, free, (), query.search.refined_labels if is_refined else math.inf)
    except (InfeasibleError, ImpossiblePlacement) as error:
        log.info(f"mesh {mesh.shape}, {query.hidden_share:.0%} of the parameters' communication hidden: {error}")
        return None


def _is_same(candidate: Candidate, mesh: Mesh, free: Solution) -> bool:
    """Whether a candidate chose the same of everything, on the same mesh."""
    return candidate.mesh == mesh and np.array_equal(candidate.solution.assignment, free.assignment)


def _step(candidate: Candidate) -> float:
    return candidate.plan.predicted.step_seconds


def _statistics(chosen: Chosen, best: Candidate) -> dict[str, float | int | str]:
    """What the search counted; its bound over all meshes is one of the sum that counts everything."""
    counts = {name: value for name, value in chosen.statistics.items() if "over_all_meshes" not in name}
    bound = chosen.statistics.get("bound_over_all_meshes_seconds")
    if not isinstance(bound, float) or best.plan.hidden_share:
        return counts
    gap = 1.0 - bound / best.plan.objective_seconds
    return {**counts, "bound_over_all_meshes_seconds": bound, "gap_over_all_meshes": gap}


def _notes(chosen: Chosen, best: Candidate) -> tuple[str, ...]:
    share = best.plan.hidden_share
    if not share:
        return chosen.notes
    return (*chosen.notes, f"its sum of costs counts {1 - share:.0%} of the communication of parameters")
