"""Assignments met during a solve under budgets, and the best of those that fit.

Every assignment is a cut: for all multipliers lam >= 0 the Lagrangian bound obeys
    L(lam)  <=  cost(x) + lam.(usage(x) - budget),
so the assignments together bound max L from above (`Plans.master`), and tell which multipliers to try next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.planner.solver import mip
from autopar.planner.solver.labelling import Floats, Integers, MemoryRow, Problem, evaluate, is_forbidden

FITS = 1e-12
"""Rounding allowed in a sum of bytes, relative to the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """An assignment with its cost in seconds and its bytes per row (without the row's constant)."""

    labels: Integers
    cost: float
    usage: Floats


class _Usage:
    """Bytes of every row of an assignment, by one gather per row: a hundred rows of deep models take milliseconds."""

    def __init__(self, rows: Sequence[MemoryRow]) -> None:
        distinct = {id(values): values for row in rows for values in row.bytes.values()}
        starts = np.concatenate([[0], np.cumsum([len(values) for values in distinct.values()])])
        start_of = dict(zip(distinct, starts.tolist(), strict=False))
        self.flat = np.concatenate([*distinct.values(), np.zeros(0)])
        self.rows = [
            (
                np.fromiter(row.bytes, dtype=np.int64, count=len(row.bytes)),
                np.fromiter((start_of[id(values)] for values in row.bytes.values()), np.int64, len(row.bytes)),
            )
            for row in rows
        ]

    def of(self, labels: Integers) -> Floats:
        """Return bytes (rows,) without the rows' constants."""
        return np.array([float(self.flat[starts + labels[nodes]].sum()) for nodes, starts in self.rows])


class Plans:
    """All assignments of one solve; `budgets` are bytes without the rows' constants, (rows,)."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        rows = problem.memory_rows
        self.budgets = np.array([row.budget_bytes - row.constant_bytes for row in rows])
        self.units = np.maximum(np.abs(self.budgets), 1.0)
        self._usage = _Usage(rows)
        self._without_rows = replace(problem, memory_rows=())
        self.known: list[Assigned] = []
        self.best: Assigned | None = None
        self.last: Assigned | None = None
        self._seen: dict[bytes, Assigned] = {}

    def take(self, labels: Integers) -> Assigned:
        """Remember an assignment, unless it makes a FORBIDDEN choice; it is the best if it fits and costs less."""
        key = labels.tobytes()
        if key in self._seen:
            return self._seen[key]
        cost, _ = evaluate(self._without_rows, labels)
        plan = Assigned(labels=labels, cost=cost, usage=self._usage.of(labels))
        self._seen[key] = plan
        self.last = plan
        if is_forbidden(np.asarray(cost)):
            return plan
        self.known.append(plan)
        if plan.cost < self.objective() and self.fits(plan.usage):
            self.best = plan
        return plan

    def objective(self) -> float:
        """Return the cost of the best assignment that fits, or infinity."""
        return np.inf if self.best is None else self.best.cost

    def fits(self, usage: Floats) -> bool:
        """Return whether these bytes are within all budgets."""
        return bool((usage <= self.budgets + FITS * self.units).all())

    def accepts(self, labels: Integers) -> bool:
        """Return whether an assignment fits all budgets, without remembering it."""
        return self.fits(self._usage.of(labels))

    def excess(self, plan: Assigned) -> Floats:
        """Return by how much each budget is exceeded, in budgets (rows,)."""
        return np.asarray(np.maximum(plan.usage - self.budgets, 0.0) / self.units)

    def worst_excess(self) -> Floats:
        """Return the largest excess of each row over all known assignments, in budgets (rows,).

        Only rows where it is positive can have a use for a multiplier.
        """
        known = self.known or [self.answer()]
        return np.asarray(np.max([self.excess(plan) for plan in known], axis=0))

    def answer(self) -> Assigned:
        """Return the best that fits, else the one that exceeds its worst row least, else one that is FORBIDDEN."""
        if self.best is not None:
            return self.best
        if self.known:
            return min(self.known, key=lambda plan: (float(self.excess(plan).max()), plan.cost))
        if self.last is None:
            raise AssertionError("a solve meets an assignment before it ends")
        return self.last

    def master(self, directions: Floats) -> tuple[float, Floats]:
        """Return (upper bound on max L over combinations of directions, the multipliers that attain it).

        directions: (n, rows) >= 0, in seconds per budget.
        """
        costs = np.array([plan.cost for plan in self.known])
        excess = np.stack([(plan.usage - self.budgets) / self.units for plan in self.known], axis=1)
        value, duals = mip.solve_master(costs, directions @ excess + 1.0, penalty=1e3 * float(np.abs(costs).max()))
        return value, np.asarray(duals @ directions) / self.units

    def cheapest_at(self, multipliers: Floats) -> Assigned:
        """Return the assignment that is cheapest at these multipliers."""
        return min(self.known, key=lambda plan: plan.cost + float(multipliers @ plan.usage))

    def promising(self, multipliers: Floats, priced: int, fitting: int) -> list[Assigned]:
        """Return assignments near the Lagrangian optimum at `multipliers`, and the cheapest that (nearly) fit."""
        by_price = sorted(self.known, key=lambda plan: plan.cost + float(multipliers @ plan.usage))
        by_fit = sorted(self.known, key=lambda plan: (float(self.excess(plan).max()), plan.cost))
        chosen = {plan.labels.tobytes(): plan for plan in [*by_price[:priced], *by_fit[:fitting]]}
        return list(chosen.values())
