"""Solved meshes: what is known of the meshes that were solved, for those that were not.

    (32, 8) solved: 966 ms      ->  (2, 16, 8) starts from its plan (`finer_plans`) and ends at 940 ms
    (2, 16, 8) solved: 940 ms   ->  (2, 2, 64) stops at its first bound above 940 ms, 978 ms: dropped unsolved

The stages of a mesh: price it and solve it without a memory limit, a bound for every limit; then fit it under the
limit. A mesh of more than two axes is solved no further than to a bound above the lowest objective so far; should
nothing fit below that bound, it is fitted from there, and solved to its end where no limit binds. Only the most
promising problem is kept: another one is priced again when its turn comes. Where the limit binds, the best coarser mesh
is fitted first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.layouts.placement import Mesh
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.memory_rows import MemoryModel
from autopar.planner.memory.shortage import DoesNotFit, Slower
from autopar.planner.meshes.contenders import Contender, Plain
from autopar.planner.meshes.mesh_search import Stage
from autopar.planner.meshes.mesh_shapes import coarser, link_key, parts_of
from autopar.planner.one_mesh.finer_plans import Decision, decisions, labels_on
from autopar.planner.one_mesh.mesh_plan import Candidate, as_it_is, fit, hides_all, price, solve_free
from autopar.planner.one_mesh.query import Query
from autopar.planner.problem.build import Built
from autopar.planner.problem.limits import LIMITS
from autopar.planner.solver import Problem, Solution, Status, is_forbidden
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_seconds
from autopar.plans.plan_value import Prediction

log = logging.getLogger(__name__)


Made = Sequence[Decision]


class SolvedMeshes:
    """The `Candidates` of one search over meshes. best: of those that were fitted; fastest: the one with the shortest
    played step; free_bounds: of those that were solved.

    floors: bounds in seconds that are known of meshes, and then only these are tried. contender: asked once before
    meshes of more than two axes are solved, which are left out where it is a `far_answer`, and else where their bound
    is above it; and once where the best optimum is known and does not fit, as fitting it is most of the work. Meshes
    that are slower without a memory limit are then not fitted, and fitting ends where they are slower under it, for one
    mesh and those behind it whose optimum does not fit either; where the contender is a `close_answer`, and so probably
    faster than what fits, the search under the limit gets `time_share_if_close` of its time."""

    def __init__(
        self,
        query: Query,
        meshes: Sequence[Mesh],
        floors: Mapping[Mesh, float] | None = None,
        contender: Contender | None = None,
    ) -> None:
        self._query, self._floors, self._contender = query, floors, contender
        self._other_seconds = math.inf
        self._was_asked_early = False
        self._fit_query = query
        self._per_node = query.cluster.devices_per_node
        self._always = max(LIMITS.axes_always_tried, min(len(mesh.shape) for mesh in meshes))
        by_links = {link_key(mesh, self._per_node): mesh for mesh in meshes}
        self._coarser = {
            mesh: sorted((by_links[key] for key in coarser(mesh, self._per_node) if key in by_links), key=_size_first)
            for mesh in meshes
        }
        self._entries: dict[int, int] = {}
        self._expected = 0.0
        self._lowest = math.inf
        self._held: tuple[Mesh, Built, Solution] | None = None
        self._early: Candidate | None = None
        self._was_played_early = False
        self._binds: bool | None = None
        self._fitted_slower: list[Mesh] = []
        self._free: dict[Mesh, tuple[float, Made]] = {}
        self._fitted: dict[Mesh, tuple[float, Made]] = {}
        self.free_bounds: dict[Mesh, float] = {}
        self.best: Candidate | None = None
        self.fastest: Candidate | None = None

    @property
    def others(self) -> tuple[Candidate, ...]:
        """The one with the shortest played step, where that is not the best."""
        return () if self.fastest is None or self.fastest is self.best else (self.fastest,)

    def stages(self, mesh: Mesh) -> Iterator[Stage[Mesh, Plan]]:
        """What becomes known of one mesh, step by step. Raises InfeasibleError and ImpossiblePlacement."""
        free = self._solved(mesh, self._cutoff(mesh))
        yield Stage(bound=free.lower_bound)
        if self._is_refined(mesh):
            self._refuse_slower(mesh, free)
        if is_forbidden(np.asarray(free.objective)):
            free = self._solved(mesh, math.inf)
            yield Stage(bound=free.lower_bound)
        self._ask_contender(mesh, free)
        self._refuse_behind_slower(mesh, free)
        helper = self._helper(mesh, free)
        if helper is not None:
            yield Stage(bound=free.lower_bound, after=helper)
        plan = self._fit(mesh, free)
        yield Stage(
            bound=plan.bound_seconds, objective=plan.objective_seconds, result=plan, implied=self._implied(plan)
        )

    def estimate(self, mesh: Mesh) -> tuple[float, ...]:
        """Bounds of its coarser meshes, ascending; () for those that are always tried."""
        if not self._is_refined(mesh):
            return ()
        return tuple(sorted(self.free_bounds.get(other, math.inf) for other in self._coarser[mesh]))

    def refusal(self, mesh: Mesh) -> str:
        """Why a mesh is left out; empty where it is tried, which counts its estimate: the entries of its tables, from
        those of meshes with one axis less. The same in every process."""
        if self._floors is not None:
            return "" if mesh in self._floors else "they were not solved for the whole batch"
        num_axes, limit = len(mesh.shape), self._query.search.table_entries
        if not self._is_refined(mesh):
            return ""
        if self._contender is not None and not self._was_asked_early and math.isfinite(self._lowest):
            plain = Plain(seconds=self._lowest, is_short=self._held_is_short(), bounds=self.free_bounds)
            self._other_seconds, self._was_asked_early = self._contender.step_before("finer meshes", plain), True
        if self._other_seconds < LIMITS.far_answer * self._lowest:
            return (
                f"another answer takes {format_seconds(self._other_seconds)}, and the best mesh of fewer axes at least "
                f"{format_seconds(self._lowest)}"
            )
        early = self._played_early() or (None if self._contender is None else self._contender.played)
        if early is not None and hides_all(early):
            return (
                f"{format_seconds(early.exposed_communication_seconds)} of a step of "
                f"{format_seconds(early.step_seconds)} on fewer axes is communication that nothing hides"
            )
        fewer = self._entries.get(num_axes - 1)
        if fewer is None:
            return f"no mesh of {num_axes - 1} axes was"
        expected = float(self._entries.get(num_axes, fewer * LIMITS.entries_per_axis))
        if self._expected + expected > limit:
            return f"their tables have about {expected:.0e} entries each, and {limit:.0e} are allowed in all"
        self._expected += expected
        return ""

    def _played_early(self) -> Prediction | None:
        """Of the best optimum on few axes, which is played once, when they are all solved; None where it does not
        fit."""
        if not self._was_played_early and self._held is not None:
            self._was_played_early = True
            mesh, built, free = self._held
            if self._modelled_bytes(built, mesh, free) <= LIMITS.fits_maybe * self._query.budget_bytes:
                self._early = as_it_is(self._query, built, mesh, free)
        return None if self._early is None else self._early.plan.predicted

    def _is_refined(self, mesh: Mesh) -> bool:
        return len(mesh.shape) > self._always

    def _cutoff(self, mesh: Mesh) -> float:
        """Seconds above which a bound is enough to know of a mesh."""
        if not self._is_refined(mesh):
            return math.inf
        return min(self._lowest, self._other_seconds)

    def _solved(self, mesh: Mesh, cutoff: float) -> Solution:
        """The optimum without a memory limit, or a bound above `cutoff`."""
        query = self._query
        built = price(query, mesh)
        free = solve_free(query, built, mesh, self._starts(mesh, built, self._free), cutoff)
        log.info(f"mesh {mesh.shape}: at least {format_seconds(free.lower_bound)}")
        self._entries[len(mesh.shape)] = max(_table_entries(built.problem), self._entries.get(len(mesh.shape), 0))
        self.free_bounds[mesh] = free.lower_bound
        if free.lower_bound <= cutoff:
            self._free[mesh] = free.objective, decisions(built, free.assignment)
            if free.objective < self._lowest:
                self._lowest, self._held = free.objective, (mesh, built, _light(free))
        return _light(free)

    def _helper(self, mesh: Mesh, free: Solution) -> Mesh | None:
        """A coarser mesh to fit first, where the limit binds: its problem is smaller, and its plan a start for this."""
        if not self._is_refined(mesh):
            return None
        if self._binds is None and self._held is not None and self._held[0] == mesh:
            self._binds = self._is_short(mesh, free)
        known = [other for other in self._coarser[mesh] if other in self.free_bounds]
        best = min(known, key=self.free_bounds.__getitem__, default=None)
        return best if self._binds else None

    def _ask_contender(self, mesh: Mesh, free: Solution) -> None:
        """Raises Slower."""
        if self._contender is not None and self.best is None and self._is_short(mesh, free):
            self._other_seconds = self._contender.step_before(
                "fitting", Plain(seconds=free.objective, is_short=True, bounds=self.free_bounds)
            )
            self._contender = None
            self._fit_query = replace(self._query, stop_above=min(self._query.stop_above, self._other_seconds))
            if self._other_seconds < LIMITS.close_answer * free.objective:
                search = self._query.search
                least = min(search.memory_seconds, LIMITS.least_memory_seconds)
                less = max(LIMITS.time_share_if_close * search.memory_seconds, least)
                self._fit_query = replace(self._fit_query, search=replace(search, memory_seconds=less))
        if self._contender is None:
            self._refuse_slower(mesh, free)

    def _refuse_slower(self, mesh: Mesh, free: Solution) -> None:
        if free.lower_bound >= self._other_seconds:
            raise Slower(mesh, free.lower_bound, self._other_seconds, "without a memory limit")

    def _refuse_behind_slower(self, mesh: Mesh, free: Solution) -> None:
        """Raises Slower where a mesh with a lower bound was slower under the limit, and this one is short, too."""
        if not self._fitted_slower or self.best is not None:
            return
        built = price(self._query, mesh)
        if self._modelled_bytes(built, mesh, free) > self._query.budget_bytes:
            before = f"and does not fit, as mesh {self._fitted_slower[0].shape}, which is slower under the limit"
            raise Slower(mesh, free.lower_bound, self._other_seconds, f"without a memory limit {before}")

    def _held_is_short(self) -> bool:
        """Whether the best optimum on few axes does not fit."""
        return self._held is not None and self._played_early() is None and self._is_short(self._held[0], self._held[2])

    def _is_short(self, mesh: Mesh, free: Solution) -> bool:
        """Whether the best optimum so far needs more memory than there is."""
        if self._held is None or self._held[0] != mesh:
            return False
        if self._early is not None and self._early.mesh == mesh:
            return False
        return self._modelled_bytes(self._held[1], mesh, free) > self._query.budget_bytes

    def _modelled_bytes(self, built: Built, mesh: Mesh, free: Solution) -> float:
        """At the fullest moment, as far as rows of moments count."""
        model = MemoryModel(built, mesh, self._query.state_bytes, Lifetimes(self._query.program))
        return float(model.over_time(free.assignment).max())

    def _fit(self, mesh: Mesh, free: Solution) -> Plan:
        early = self._early
        if early is not None and early.mesh == mesh:
            candidate, self._binds = early, False
        else:
            candidate = self._fitted_candidate(mesh, free)
        plan = candidate.plan
        self._fitted[mesh] = plan.objective_seconds, decisions(candidate.built, candidate.solution.assignment)
        if self.best is None or plan.objective_seconds < self.best.plan.objective_seconds:
            self.best = candidate
        if self.fastest is None or plan.predicted.step_seconds < self.fastest.plan.predicted.step_seconds:
            self.fastest = candidate
        return plan

    def _fitted_candidate(self, mesh: Mesh, free: Solution) -> Candidate:
        query = self._fit_query
        held, self._held = self._held, None
        built = held[1] if held is not None and held[0] == mesh else price(query, mesh)
        del held
        starts = self._starts(mesh, built, self._fitted)
        try:
            most = query.search.refined_labels if self._is_refined(mesh) else math.inf
            candidate = fit(query, built, mesh, free, starts, most)
        except DoesNotFit:
            self._binds = True
            raise
        except Slower:
            self._fitted_slower.append(mesh)
            raise
        self._binds = candidate.built is not built
        if not self._binds and free.status is Status.GAP:
            candidate = fit(query, built, mesh, solve_free(query, built, mesh, (free.assignment,)), starts)
        return candidate

    def _starts(
        self, mesh: Mesh, built: Built, known: Mapping[Mesh, tuple[float, Made]]
    ) -> tuple[NDArray[np.int64], ...]:
        """The best baselines of coarser meshes, said on this one."""
        found = [other for other in self._coarser[mesh] if other in known]
        best = sorted(found, key=lambda other: known[other][0])[: LIMITS.coarser_starts]
        return tuple(labels_on(built, mesh, known[other][1], self._parts(mesh, other)) for other in best)

    def _parts(self, mesh: Mesh, other: Mesh) -> tuple[int, ...]:
        parts = parts_of(mesh, other, self._per_node)
        assert parts is not None, "it is coarser"
        return parts

    def _implied(self, plan: Plan) -> dict[Mesh, float]:
        """Bounds of the coarser meshes of which neighbouring axes were cut: their plans are plans here, no
        dearer. Where other axes stand between the parts, blocks nest in another order."""
        if len(plan.mesh.shape) > LIMITS.axes_of_exact_nesting:
            return {}
        nested = [other for other in self._coarser[plan.mesh] if _is_sorted(self._parts(plan.mesh, other))]
        return dict.fromkeys(nested, plan.bound_seconds)


def _is_sorted(parts: tuple[int, ...]) -> bool:
    return parts == tuple(sorted(parts))


def _size_first(mesh: Mesh) -> tuple[int, tuple[int, ...]]:
    return len(mesh.shape), mesh.shape


def _table_entries(problem: Problem) -> int:
    """Entries of the edges' tables, each once however many edges share it."""
    return sum({id(edge.costs): edge.costs.size for edge in problem.edges}.values())


def _light(solution: Solution) -> Solution:
    """Without its messages, which fill some hundred MB for a deep model and have served."""
    certificate = replace(solution.certificate, steps=(), messages=np.zeros(0))
    return replace(solution, messages={}, certificate=certificate)
