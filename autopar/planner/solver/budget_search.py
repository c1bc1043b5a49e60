"""The state of one solve under budgets: assignments met, the bound, the price that proves it.

    search = BudgetSearch(problem, original, gap, deadline)
    search.without_budgets(None)                      lam = 0
    search.look(multipliers, SWEEPS)                  another price: `bound` rises or stays, `plans` knows more
    search.outcome()

A hundred memory rows are one graph (`label_bytes.py`), whatever has a price. `rows` are the active ones: those that the
search for better plans looks at.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from autopar.planner.solver.active_rows import first_rows
from autopar.planner.solver.assignments import Plans
from autopar.planner.solver.deadline import Deadline
from autopar.planner.solver.directions import Directions
from autopar.planner.solver.exact import Proof, solve_graph
from autopar.planner.solver.label_bytes import graph_of
from autopar.planner.solver.labelling import Floats, Integers, Problem
from autopar.planner.solver.least_bytes import EXACT
from autopar.planner.solver.mixtures import Mixtures, priced
from autopar.planner.solver.relaxation import Look, Relaxation
from autopar.planner.solver.solution import Warmth

SWEEPS = 10
"""Sweeps of one look."""
PRICE_GAP = 0.1
"""A solve at one price stops at this part of the gap."""
ENOUGH = 1e-5
"""A relative change of bound or objective that is worth another round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetedOutcome:
    """The best assignment, the bound, and the proof of (most of) it at `multipliers`."""

    assignment: Integers
    bound: float
    proof: Proof
    multipliers: tuple[float, ...]
    infeasible: bool = False
    statistics: dict[str, float | int | str] = field(default_factory=dict)
    messages: Warmth = field(default_factory=dict)


class BudgetSearch:
    """The state of one solve: assignments met, the bound, the multipliers and their proof."""

    def __init__(
        self, problem: Problem, original: Problem, gap: float, deadline: Deadline, stop_above: float = np.inf
    ) -> None:
        self.original, self.gap, self.deadline, self.stop_above = original, gap, deadline, stop_above
        self.plans = Plans(original)
        self.directions = Directions(self.plans)
        self.problem = problem
        self.graph = graph_of(problem)
        self.rows = first_rows(problem)
        self.relaxation: Relaxation | None = None
        self.removed = np.zeros(0, dtype=bool)
        self.first_step = 1.0
        self.bound = -np.inf
        self.multipliers: Floats = np.zeros(len(problem.memory_rows))
        self.proof = Proof(bound=-np.inf, steps=(), messages=np.zeros(0), eliminated=False)
        self.infeasible = False
        self.statistics: dict[str, float | int | str] = {"method": "lagrangian", "prices": 0}

    def finished(self) -> bool:
        """Return whether the gap is reached, the bound is above what counts, or time is up."""
        best = self.plans.objective()
        enough = best - self.bound <= self.gap * abs(best) < np.inf or self.bound > self.stop_above
        return enough or self.deadline.left() <= 0.0

    def without_budgets(self, warm_start: Integers | None) -> None:
        """Solve at multipliers 0: a bound, and the answer if it fits."""
        if self.graph.nodes() and self.is_deep:
            self.look(np.zeros(len(self.plans.budgets)), SWEEPS)
            return
        outcome = solve_graph(
            priced(self.graph, np.zeros(len(self.plans.budgets))),
            gap=max(0.1 * self.gap, EXACT),
            deadline=self.deadline,
            pool=() if warm_start is None else (warm_start,),
        )
        for labels in [*outcome.pool[-4:], outcome.assignment]:
            self.plans.take(labels)
        self.proof = outcome.proof
        self.bound = max(self.bound, outcome.bound)

    def price(self, multipliers: Floats) -> None:
        """Solve at these multipliers to the gap that counts: a bound, assignments, and a proof."""
        if self.is_deep:
            self.look(multipliers, SWEEPS)
            return
        outcome = solve_graph(
            priced(self.graph, multipliers), gap=max(PRICE_GAP * self.gap, EXACT), deadline=self.deadline
        )
        for labels in [*outcome.pool[-4:], outcome.assignment]:
            self.plans.take(labels)
        bound = outcome.bound - float(multipliers @ self.plans.budgets)
        if bound > self.bound:
            self.bound, self.proof, self.multipliers = bound, outcome.proof, multipliers
        self.statistics["prices"] = int(self.statistics["prices"]) + 1

    @property
    def is_deep(self) -> bool:
        """Whether layers repeat, so that a look at a price ends with the bound of that price."""
        return self.relaxed().lifting is not None

    def look(self, multipliers: Floats, sweeps: int) -> None:
        """Ascend at these multipliers: a bound, and assignments."""
        look = self.relaxed().look(multipliers, sweeps, self.deadline)
        for labels in look.assignments:
            self.plans.take(labels)
        if not look.is_met:
            self._mix(multipliers)
        self._prove(look, multipliers)
        self.statistics["prices"] = int(self.statistics["prices"]) + 1

    def _mix(self, multipliers: Floats) -> None:
        """Take the best mixture of good assignments at these multipliers."""
        if self.deadline.left() > 0.0 and self.plans.known:
            good = [plan.labels for plan in self.plans.promising(multipliers, 6, 0)]
            labels = Mixtures(self.graph, good).at(multipliers)
            if labels is not None:
                self.plans.take(labels)

    def relaxed(self) -> Relaxation:
        """Return the relaxation of the active rows."""
        if self.relaxation is None:
            self.relaxation = Relaxation(self.graph, self.plans.budgets)
            self.removed = np.zeros(self.relaxation.unpriced.size, dtype=bool)
        return self.relaxation

    def _prove(self, look: Look, multipliers: Floats) -> None:
        best = self.plans.objective()
        if best < np.inf:
            self.removed |= look.bound + look.slack > best * (1.0 + 1e-10)
        if look.bound > self.proof.bound - float(self.multipliers @ self.plans.budgets):
            allowance = float(multipliers @ self.plans.budgets)
            self.multipliers = multipliers
            self.proof = Proof(
                bound=look.bound + allowance,
                steps=tuple(self.graph.steps),
                messages=look.messages,
                eliminated=False,
            )
        self.bound = max(self.bound, look.bound)

    def outcome(self) -> BudgetedOutcome:
        """Return what was found."""
        if self.plans.best is None and not self.infeasible and self.bound <= self.stop_above:
            self.statistics["no_plan"] = "no assignment that fits was found in the time; there may be one"
        allowance = float(self.multipliers @ self.plans.budgets)
        return BudgetedOutcome(
            assignment=self.plans.answer().labels,
            bound=self.bound,
            proof=replace(self.proof, bound=self.proof.bound - allowance),
            multipliers=tuple(self.multipliers.tolist()),
            infeasible=self.infeasible,
            statistics=self.statistics,
        )
