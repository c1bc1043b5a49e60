"""Resolve: the problem of a plan solved again with something changed: a choice forbidden, a limit taken away.

    resolver = Resolver(recover(query, plan), cpu_seconds=10.0)
    resolver.without_choice(index).objective      the best plan in which decision `index` is not what it is now
    resolver.without_limit().objective            the best plan if memory were free

Only labels that are forbidden cost more than before, so answers and plan share all prices. Where the cheapest answer
would not fit into memory it is sought again under the rows of the memory model, with the transients that the plan's
own program shows (`within_memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.planner.memory.lowered_bytes import completed_bytes, transient_bytes
from autopar.planner.memory.memory_rows import MemoryModel
from autopar.planner.memory.recomputation import DROPPED, RECOMPUTED, SAVED, with_states
from autopar.planner.one_mesh.mesh_plan import EXACT_GAP, Attempt, read_plan
from autopar.planner.one_mesh.read_solution import describe
from autopar.planner.one_mesh.recovered_problem import Recovered, described, expanded
from autopar.planner.one_mesh.warm_start import Rows
from autopar.planner.one_mesh.within_memory import MEMORY_GAP
from autopar.planner.problem.build import Built
from autopar.planner.problem.prices import Floats
from autopar.planner.solver import (
    FORBIDDEN,
    MemoryRow,
    Problem,
    evaluate,
    is_forbidden,
    solution_of,
    solve,
)

Flags = NDArray[np.bool_]
Forbidden: TypeAlias = Callable[[Built], dict[int, Flags]]
"""A problem -> decision -> which of its labels may not be chosen."""
ROUNDS = 3
"""How often moments at which an answer holds more than the limit become rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """An answer: labels of `built`, seconds, what no other answer is under; rows: of memory, where that took part."""

    built: Built
    labels: Rows
    objective: float
    lower_bound: float
    rows: tuple[MemoryRow, ...] = ()


class Resolver:
    """Asks the problem of one plan again. cpu_seconds: of one answer; memory_gap: relative gap at which a search within
    memory ends."""

    def __init__(self, recovered: Recovered, cpu_seconds: float, memory_gap: float = MEMORY_GAP) -> None:
        self.recovered, self.cpu_seconds, self.memory_gap = recovered, cpu_seconds, memory_gap

    # what the plan itself holds

    @cached_property
    def attempt(self) -> Attempt:
        """The plan lowered for one rank and measured, whatever it holds."""
        recovered = self.recovered
        found = solution_of(recovered.built.problem, recovered.labels)
        query = replace(recovered.query, budget_bytes=np.inf)
        return read_plan(query, recovered.mesh, recovered.built, found, recovered.lifetimes)

    @cached_property
    def model(self) -> MemoryModel:
        """Of the plan's own problem."""
        return self._model_of(self.recovered.built)

    @cached_property
    def over_time(self) -> Floats:
        """(positions,) bytes of the plan's program."""
        return completed_bytes(self.attempt.measured, self.model.over_time(self.recovered.labels))

    @cached_property
    def beyond(self) -> Floats:
        """(positions,) bytes of transients that the memory model does not count, as memory rows take them."""
        return transient_bytes(self.attempt.measured, self.model.over_time(self.recovered.labels))

    @property
    def fullest(self) -> int:
        """The position of the plan's peak."""
        return int(np.argmax(self.over_time))

    # questions

    def without_choice(self, index: int) -> Resolved:
        """The best answer in which decision `index` is described otherwise. Raises InfeasibleError where there is
        none."""
        chosen = int(self.recovered.labels[index])
        has_states = self.recovered.built is not self.recovered.plain
        said = describe(self.recovered.built.variables[index], chosen, self.recovered.mesh, with_state=has_states)

        def forbidden(built: Built) -> dict[int, Flags]:
            texts = described(built.variables[index], self.recovered.mesh, with_state=has_states)
            return {index: np.array([text == said for text in texts])}

        if all(forbidden(self.recovered.plain)[index]) and not has_states:
            raise InfeasibleError(f"{said} is the only choice that is left")
        return self._best(forbidden)

    def optimum(self) -> Resolved:
        """The best answer to the problem as it is: the plan, where the search found the optimum."""
        return self._best(lambda built: {})

    def with_more(self, more_bytes: float) -> Resolved:
        """The best answer within so much more memory than the limit. Raises InfeasibleError where none was found."""
        return self._best(lambda built: {}, more_bytes)

    def without_limit(self) -> Resolved:
        """The best answer if memory were free."""
        return self._solved(self.recovered.plain, {}, (), self._plain_labels())

    # solving

    def _best(self, forbidden: Forbidden, more_bytes: float = 0.0) -> Resolved:
        recovered = self.recovered
        budget = recovered.query.budget_bytes + more_bytes
        if recovered.built is recovered.plain:
            free = self._solved(recovered.plain, forbidden(recovered.plain), (), self._plain_labels())
            holds = self.model.over_time(free.labels) - self.model.over_time(recovered.labels) + self.over_time
            if float(np.max(holds)) <= budget:
                return free
        built = self._with_recomputation
        return self._within_memory(built, forbidden(built), budget)

    def _within_memory(self, built: Built, forbidden: dict[int, Flags], budget: float) -> Resolved:
        model = self._model_of(built)
        starts = self._starts(built)
        plans = [model.over_time(labels) + self.beyond for labels in starts]
        positions = model.fullest_positions(plans)
        for _ in range(ROUNDS):
            rows = (*model.rows(positions, budget, self.beyond), *self.recovered.links)
            found = self._solved(built, forbidden, rows, starts[0])
            held = model.over_time(found.labels) + self.beyond
            missed = {p for p in model.fullest_positions([held]) if held[p] > budget} - set(positions)
            if not missed:
                break
            positions = sorted({*positions, *missed})
        return found

    def _solved(
        self, built: Built, forbidden: dict[int, Flags], rows: Sequence[MemoryRow], start: Rows | None
    ) -> Resolved:
        problem = replace(without(built.problem, forbidden), memory_rows=tuple(rows))
        warm = None if start is None else _nearest(problem, start)
        solution = solve(
            problem,
            gap=self.memory_gap if rows else EXACT_GAP,
            cpu_limit=self.cpu_seconds,
            warm_start=warm,
            stop=self.recovered.query.deadline.stop,
        )
        objective, used = evaluate(problem, solution.assignment)
        over = [total > row.budget_bytes * (1 + 1e-9) for total, row in zip(used, problem.memory_rows, strict=True)]
        if is_forbidden(np.asarray(objective)) or any(over):
            why = "fits into memory" if any(over) else "can stand beside the rest"
            raise InfeasibleError(f"no other choice {why}")
        return Resolved(built, solution.assignment, objective, solution.lower_bound, tuple(rows))

    @cached_property
    def _with_recomputation(self) -> Built:
        recovered = self.recovered
        if recovered.built is not recovered.plain:
            return recovered.built
        return expanded(recovered.query, recovered.plain, recovered.lifetimes)

    def _plain_labels(self) -> Rows:
        sizes = np.array([len(costs) for costs in self.recovered.plain.problem.node_costs])
        return np.asarray(self.recovered.labels % sizes)

    def _starts(self, built: Built) -> list[Rows]:
        """Labels of `built` from which a search within memory may begin: the plan, and as much as possible computed
        again."""
        plain = self._plain_labels()
        own = self.recovered.labels
        saved = with_states(self.recovered.plain, built, plain, (SAVED, DROPPED, RECOMPUTED))
        again = with_states(self.recovered.plain, built, plain, (RECOMPUTED, SAVED, DROPPED))
        return [own if built is self.recovered.built else saved, again]

    def _model_of(self, built: Built) -> MemoryModel:
        recovered = self.recovered
        if built not in self._models:
            states = dict(recovered.query.state_bytes)
            self._models[built] = MemoryModel(built, recovered.mesh, states, recovered.lifetimes)
        return self._models[built]

    @cached_property
    def _models(self) -> dict[Built, MemoryModel]:
        return {}


def without(problem: Problem, forbidden: dict[int, Flags]) -> Problem:
    """The same problem with some labels forbidden."""
    costs = list(problem.node_costs)
    for index, flags in forbidden.items():
        costs[index] = np.where(flags, FORBIDDEN, costs[index])
    return replace(problem, node_costs=tuple(costs))


def _nearest(problem: Problem, labels: Rows) -> Rows:
    """The labels, with every forbidden one replaced by the cheapest beside its neighbours."""
    found = labels.copy()
    changed = [node for node, costs in enumerate(problem.node_costs) if is_forbidden(costs[labels[node]])]
    for node in changed:
        costs = problem.node_costs[node].copy()
        for edge in problem.edges:
            if edge.source == node:
                costs = costs + edge.costs[:, found[edge.target]]
            elif edge.target == node:
                costs = costs + edge.costs[found[edge.source]]
        found[node] = int(np.argmin(costs))
    return found
