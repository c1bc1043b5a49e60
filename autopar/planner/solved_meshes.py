"""Solved meshes: what is known of the meshes that were solved, for those that were not.

    (32, 8) solved: 966 ms      ->  (2, 16, 8) starts from its plan (`finer_plans`) and ends at 940 ms
    (2, 16, 8) solved: 940 ms   ->  (2, 2, 64) stops at its first bound above 940 ms, 978 ms: dropped unsolved

The stages of a mesh: price it and solve it without a memory limit, a bound for every limit; then fit it under the
limit. A mesh of more than two axes is solved no further than to a bound above the lowest objective so far; should
nothing fit below that bound, it is fitted from there, and solved to its end where no limit binds. Only the most
promising problem is kept: another one is priced again when its turn comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopar.layout import Mesh
from autopar.parallel_plan import Plan
from autopar.plan_text import format_seconds
from autopar.planner.build import Built
from autopar.planner.finer_plans import Decision, decisions, labels_on
from autopar.planner.mesh_search import Stage
from autopar.planner.mesh_shapes import coarser, link_key, parts_of
from autopar.planner.one_mesh import Candidate, fit, price, solve_free
from autopar.planner.prices import TIE_BREAK_SECONDS
from autopar.planner.query import Progress, Query
from autopar.planner.solver import Problem, Solution, Status, is_forbidden

AXIS_GROWTH = 36
"""An axis multiplies the entries of the tables by about this: six choices per operator, on both sides of an edge."""
ALWAYS_TRIED = 2
"""Meshes of up to this many axes are all tried: their tables are small."""
EXACT_AXES = 3
"""Up to this many axes a mesh has every plan of its coarser ones (`strategies.MOST_CHANGES`)."""

Made = Sequence[Decision]


class SolvedMeshes:
    """The state of one search over meshes. best: of those that were fitted; free_bounds: of those that were solved."""

    def __init__(self, query: Query, meshes: Sequence[Mesh], log: Progress) -> None:
        self._query, self._log = query, log
        self._per_node = query.cluster.devices_per_node
        self._always = max(ALWAYS_TRIED, min(len(mesh.shape) for mesh in meshes))
        by_links = {link_key(mesh, self._per_node): mesh for mesh in meshes}
        self._coarser = {
            mesh: sorted((by_links[key] for key in coarser(mesh, self._per_node) if key in by_links), key=_size_first)
            for mesh in meshes
        }
        self._entries: dict[int, int] = {}
        self._expected = 0.0
        self._lowest = math.inf
        self._held: tuple[Mesh, Built] | None = None
        self._free: dict[Mesh, tuple[float, Made]] = {}
        self._fitted: dict[Mesh, tuple[float, Made]] = {}
        self.free_bounds: dict[Mesh, float] = {}
        self.best: Candidate | None = None

    def stages(self, mesh: Mesh) -> Iterator[Stage[Mesh, Plan]]:
        """What becomes known of one mesh, step by step. Raises InfeasibleError and ImpossiblePlacement."""
        cutoff = self._lowest if self._is_refined(mesh) else math.inf
        free = self._solved(mesh, cutoff)
        yield Stage(bound=free.lower_bound)
        if is_forbidden(np.asarray(free.objective)):
            free = self._solved(mesh, math.inf)
            yield Stage(bound=free.lower_bound)
        plan = self._fit(mesh, free)
        yield Stage(
            bound=plan.bound_seconds, objective=plan.objective_seconds, result=plan, implied=self._implied(plan)
        )

    def promise(self, mesh: Mesh) -> tuple[float, ...]:
        """Bounds of its coarser meshes, ascending; () for those that are always tried."""
        if not self._is_refined(mesh):
            return ()
        return tuple(sorted(self.free_bounds.get(other, math.inf) for other in self._coarser[mesh]))

    def refusal(self, mesh: Mesh) -> str:
        """Why a mesh is left out; empty where it is tried, which counts its estimate: the entries of its tables, from
        those of meshes with one axis less. The same in every process."""
        num_axes, limit = len(mesh.shape), self._query.search.table_entries
        if not self._is_refined(mesh):
            return ""
        fewer = self._entries.get(num_axes - 1)
        if fewer is None:
            return f"no mesh of {num_axes - 1} axes was"
        expected = float(self._entries.get(num_axes, fewer * AXIS_GROWTH))
        if self._expected + expected > limit:
            return f"their tables have about {expected:.0e} entries each, and {limit:.0e} are allowed in all"
        self._expected += expected
        return ""

    def _is_refined(self, mesh: Mesh) -> bool:
        return len(mesh.shape) > self._always

    def _solved(self, mesh: Mesh, cutoff: float) -> Solution:
        """The optimum without a memory limit, or a bound above `cutoff`."""
        query = self._query
        built = price(query, mesh)
        free = solve_free(query, built, mesh, self._starts(mesh, built, self._free), cutoff)
        self._log(f"mesh {mesh.shape}: at least {format_seconds(free.lower_bound)}")
        self._entries[len(mesh.shape)] = max(_table_entries(built.problem), self._entries.get(len(mesh.shape), 0))
        self.free_bounds[mesh] = free.lower_bound
        if free.lower_bound <= cutoff:
            self._free[mesh] = free.objective, decisions(built, free.assignment)
            if free.objective < self._lowest:
                self._lowest, self._held = free.objective, (mesh, built)
        return _light(free)

    def _fit(self, mesh: Mesh, free: Solution) -> Plan:
        query = self._query
        held, self._held = self._held, None
        built = held[1] if held is not None and held[0] == mesh else price(query, mesh)
        del held
        starts = self._starts(mesh, built, self._fitted)
        candidate = fit(query, built, mesh, free, self._log, starts)
        if candidate.built is built and free.status is Status.GAP:
            candidate = fit(query, built, mesh, solve_free(query, built, mesh, (free.assignment,)), self._log, starts)
        plan = candidate.plan
        self._fitted[mesh] = plan.objective_seconds, decisions(candidate.built, candidate.solution.assignment)
        if self.best is None or plan.objective_seconds < self.best.plan.objective_seconds:
            self.best = candidate
        return plan

    def _starts(
        self, mesh: Mesh, built: Built, known: Mapping[Mesh, tuple[float, Made]]
    ) -> tuple[NDArray[np.int64], ...]:
        """The best known plan of a coarser mesh, said on this one."""
        found = [other for other in self._coarser[mesh] if other in known]
        if not found:
            return ()
        best = min(found, key=lambda other: known[other][0])
        part_of = parts_of(mesh, best, self._per_node)
        assert part_of is not None, "it is coarser"
        return (labels_on(built, mesh, known[best][1], part_of),)

    def _implied(self, plan: Plan) -> dict[Mesh, float]:
        """Bounds of the coarser meshes: their plans are plans here, which cost more by tie-breaks at most."""
        if len(plan.mesh.shape) > EXACT_AXES:
            return {}
        ties = 2 * TIE_BREAK_SECONDS * (int(plan.statistics["variables"]) + int(plan.statistics["edges"]))
        return dict.fromkeys(self._coarser[plan.mesh], plan.bound_seconds - ties)


def _size_first(mesh: Mesh) -> tuple[int, tuple[int, ...]]:
    return len(mesh.shape), mesh.shape


def _table_entries(problem: Problem) -> int:
    """Entries of the edges' tables, each once however many edges share it."""
    return sum({id(edge.costs): edge.costs.size for edge in problem.edges}.values())


def _light(solution: Solution) -> Solution:
    """Without its messages, which fill some hundred MB for a deep model and have served."""
    certificate = replace(solution.certificate, steps=(), messages=np.zeros(0))
    return replace(solution, messages={}, certificate=certificate)
