"""Budgets: the Lagrangian bound by Dantzig-Wolfe decomposition, then recombination, then branch and bound.

Pricing bytes at multipliers lam >= 0 (seconds per byte) gives a problem without budgets, and for every lam a
bound:
    L(lam) = min_x  c(x) + lam.(m(x) - M)  <=  optimum within the budgets M.
- The oracle (`_Budgeted.price`) is the exact stack, so every L(lam) is proven, whatever lam is.
- The master (`mip.solve_master`, GLOP) mixes the assignments generated so far so that they fit on average;
  its duals are the next lam (`_Budgeted.ascend`); its value bounds max_lam L from above, and tells when to
  stop.
- Assignments within the budgets are met on the way. `recombine` splices them (`splice.py`), and solves, by
  HiGHS, the problem restricted to labels of good ones.
- `close` removes labels by reduced costs at the best lam, L + slack > best objective, reduces again, and
  gives the rest to HiGHS. Its bound is HiGHS' word; the certificate proves max L.

What remains between max L and the optimum is the duality gap; it shrinks with the number of layers
(relative 1e-3 .. 1e-5).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autopar.planner.solver import mip
from autopar.planner.solver.arena import Arena
from autopar.planner.solver.deadline import Deadline
from autopar.planner.solver.exact import (
    Outcome,
    Proof,
    Warmth,
    core_of,
    solve_graph,
    start_ascent,
    value_of,
)
from autopar.planner.solver.problem import Floats, Integers, MemoryRow, Problem, evaluate, is_forbidden
from autopar.planner.solver.reductions import Graph, back_substitute, simplify
from autopar.planner.solver.solution import relative_gap
from autopar.planner.solver.splice import splice

MAX_MULTIPLIERS = 30
MASTER_TOLERANCE = 1e-5
"""The ascent of multipliers ends when master and bound agree to this, relatively: finer than the duality gap.
"""
ORACLE_GAP = 1e-9
RECOMBINE_SECONDS, CLOSE_SECONDS = 30.0, 60.0
RECOMBINE_LABELS, CLOSE_LABELS = 6_000, 15_000
"""HiGHS is not started above this many labels: it would find nothing in the time."""
REFIX_ROUNDS, REFIX_LOOKS, REFIX_SWEEPS = 8, 2, 15
FITS = 1.0 + 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetedOutcome:
    """The best assignment, the bound, and the proof of (most of) it at `multipliers`."""

    assignment: Integers
    bound: float
    proof: Proof
    multipliers: tuple[float, ...]
    infeasible: bool = False
    statistics: dict[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """An assignment with its cost in seconds and its bytes per row (without the row's constant)."""

    labels: Integers
    cost: float
    usage: Floats


def solve_within_budgets(
    problem: Problem, *, gap: float, deadline: Deadline, warm_start: Integers | None
) -> BudgetedOutcome:
    """Minimise the cost within all memory rows."""
    state = _Budgeted(problem, gap, deadline)
    if warm_start is not None:
        state.take(warm_start)
    state.price(np.zeros(len(problem.memory_rows)))
    shortage = state.seek_fit()
    if shortage is not None:
        return state.outcome(shortage=shortage)
    state.ascend()
    if not state.finished():
        state.recombine()
    if not state.finished():
        state.close()
    return state.outcome()


def least_bytes(problem: Problem, row: MemoryRow, deadline: Deadline) -> tuple[Outcome, bool]:
    """Return the assignment that uses the least of one row (objective: bytes), and whether that is proven.

    Communication does not count, but FORBIDDEN choices stay forbidden: they cost more bytes than all nodes
    together.
    """
    prohibitive = 1.0 + 2.0 * sum(float(np.ptp(weights)) for weights in row.bytes.values())
    costs = [
        row.bytes.get(node, np.zeros(len(values))) + np.where(is_forbidden(values), prohibitive, 0.0)
        for node, values in enumerate(problem.node_costs)
    ]
    edges = [
        (edge.source, edge.target, np.where(is_forbidden(edge.costs), prohibitive, 0.0))
        for edge in problem.edges
        if is_forbidden(edge.costs).any()
    ]
    outcome = solve_graph(Graph(Arena(), costs, edges), gap=ORACLE_GAP, deadline=deadline)
    return outcome, relative_gap(outcome.objective, outcome.bound) <= 2 * ORACLE_GAP


class _Budgeted:
    """The state of one solve: plans met, the best that fits, the bound, the multipliers and their proof."""

    def __init__(self, problem: Problem, gap: float, deadline: Deadline) -> None:
        self.problem, self.gap, self.deadline = problem, gap, deadline
        rows = problem.memory_rows
        self.budgets = np.array([row.budget_bytes - row.constant_bytes for row in rows])
        self.units = np.maximum(np.abs(self.budgets), 1.0)
        weights: list[Floats] = [
            np.stack([row.bytes.get(node, np.zeros(len(costs))) for row in rows])
            for node, costs in enumerate(problem.node_costs)
        ]
        self.flat_weights = np.concatenate(weights, axis=1)
        self.starts = np.cumsum([0] + [len(costs) for costs in problem.node_costs])[:-1]
        edges: list[tuple[int, int, Floats]] = [
            (edge.source, edge.target, edge.costs) for edge in problem.edges
        ]
        self.graph = Graph(Arena(), problem.node_costs, edges, weights)
        simplify(self.graph)
        self.plans: list[_Plan] = []
        self.seen: set[bytes] = set()
        self.best: _Plan | None = None
        self.bound, self.proven = -np.inf, -np.inf
        self.multipliers: Floats = np.zeros(len(rows))
        self.proof = Proof(bound=-np.inf, steps=(), messages=np.zeros(0), eliminated=False)
        self.warmth: Warmth = {}
        self.statistics: dict[str, float | int | str] = {"method": "lagrangian", "prices": 0}

    def objective(self) -> float:
        """Return the cost of the best plan that fits, or infinity."""
        return np.inf if self.best is None else self.best.cost

    def finished(self) -> bool:
        closed = self.best is not None and self.objective() - self.bound <= self.gap * abs(self.objective())
        return closed or self.deadline.left() <= 0.0

    def take(self, labels: Integers) -> _Plan:
        """Remember an assignment; it is the best if it fits and costs less."""
        usage = self.flat_weights[:, self.starts + labels].sum(axis=1)
        plan = _Plan(labels=labels, cost=evaluate(self.problem, labels)[0], usage=usage)
        if labels.tobytes() not in self.seen:
            self.seen.add(labels.tobytes())
            self.plans.append(plan)
            if self._fits(usage) and plan.cost < self.objective():
                self.best = plan
        return plan

    def price(self, multipliers: Floats) -> None:
        """Solve at these multipliers: a bound, and assignments."""
        outcome = solve_graph(
            self._priced(self.graph, multipliers), gap=ORACLE_GAP, deadline=self.deadline, warmth=self.warmth
        )
        self.warmth = outcome.warmth
        for labels in [*outcome.pool[-4:], outcome.assignment]:
            self.take(labels)
        allowance = float(multipliers @ self.budgets)
        if outcome.proof.bound - allowance > self.proven:
            self.proven, self.multipliers, self.proof = (
                outcome.proof.bound - allowance,
                multipliers,
                outcome.proof,
            )
        self.bound = max(self.bound, outcome.bound - allowance)
        self.statistics["prices"] = int(self.statistics["prices"]) + 1

    def seek_fit(self) -> MemoryRow | None:
        """Take the smallest assignment of each row, until one fits; return a row that none can meet."""
        for number, row in enumerate(self.problem.memory_rows):
            if self.best is not None:
                return None
            outcome, proven = least_bytes(self.problem, row, self.deadline)
            plan = self.take(outcome.assignment)
            if proven and plan.usage[number] > self.budgets[number] + 1e-9 * self.units[number]:
                total = float(plan.usage[number]) + row.constant_bytes
                self.statistics |= {"minimum_bytes": total, "memory_row": row.name}
                self.best = plan
                return row
        return None

    def ascend(self) -> None:
        """Raise L(lam) until the master agrees, the gap is closed, or time is up."""
        for _ in range(MAX_MULTIPLIERS):
            if self.finished():
                return
            value, multipliers = self._master()
            if value - self.bound <= MASTER_TOLERANCE * abs(value):
                return
            if len(self.budgets) > 1 and self.proven > -np.inf:
                # Duals of several rows jump between vertices; half-way from the best point they settle.
                multipliers = 0.5 * (multipliers + self.multipliers)
            if np.allclose(multipliers, self.multipliers, rtol=1e-9, atol=0.0):
                return
            self.price(multipliers)

    def recombine(self) -> None:
        """Look for a better plan: splices of two good plans, and all mixtures of the labels of good plans."""
        known = [plan.labels for plan in self._promising() if np.isfinite(value_of(self.graph, plan.labels))]
        spliced = splice(self.graph, known, self.budgets - self.graph.weight_constant)
        if spliced is not None:
            self.take(spliced)
        if self.finished():
            return
        trial = self.graph.copy()
        seen = np.stack([plan.labels for plan in self._promising()])
        for node in trial.nodes():
            kept = np.flatnonzero(np.isin(trial.domains[node], seen[:, node]))
            if 0 < len(kept) < trial.size(node):
                trial.restrict(node, kept)
        simplify(trial)
        if trial.num_labels() <= RECOMBINE_LABELS:
            self._branch(trial, min(RECOMBINE_SECONDS, self.deadline.left()))

    def close(self) -> None:
        """Remove labels by their bounds at the best multipliers, then let HiGHS finish."""
        graph = self._refixed()
        self.statistics |= {"method": "branch and bound", "core_labels": graph.num_labels()}
        if graph.num_labels() > CLOSE_LABELS or self.deadline.left() <= 0.0:
            return
        found = self._branch(graph, min(CLOSE_SECONDS, self.deadline.left()))
        if found.infeasible and self.best is None:
            self.statistics["infeasible"] = "no assignment fits all rows together"
        # Removed labels cost more than the best plan, so the bound of the rest counts up to that plan.
        bound = np.inf if found.infeasible else found.bound
        self.bound = max(self.bound, min(bound, self.objective()))

    def outcome(self, shortage: MemoryRow | None = None) -> BudgetedOutcome:
        best = self.best or min(self.plans, key=lambda plan: float(self._excess(plan).sum()))
        return BudgetedOutcome(
            assignment=best.labels,
            bound=self.bound,
            proof=Proof(
                bound=self.proven,
                steps=self.proof.steps,
                messages=self.proof.messages,
                eliminated=self.proof.eliminated,
            ),
            multipliers=tuple(self.multipliers.tolist()),
            infeasible=shortage is not None or "infeasible" in self.statistics,
            statistics=self.statistics,
        )

    def _fits(self, usage: Floats) -> bool:
        return bool((usage <= self.budgets + (FITS - 1.0) * self.units).all())

    def _excess(self, plan: _Plan) -> Floats:
        return np.asarray(np.maximum(plan.usage - self.budgets, 0.0) / self.units)

    def _master(self) -> tuple[float, Floats]:
        costs = np.array([plan.cost for plan in self.plans])
        usage = np.stack([(plan.usage - self.budgets) / self.units + 1.0 for plan in self.plans], axis=1)
        value, duals = mip.solve_master(costs, usage, penalty=1e3 * float(np.abs(costs).max()))
        return value, duals / self.units

    def _promising(self) -> list[_Plan]:
        """Return plans near the Lagrangian optimum, and those that nearly fit."""
        priced = sorted(self.plans, key=lambda plan: plan.cost + float(self.multipliers @ plan.usage))
        fitting = sorted(self.plans, key=lambda plan: (float(self._excess(plan).max()), plan.cost))
        return priced[:12] + fitting[:4]

    def _priced(self, graph: Graph, multipliers: Floats) -> Graph:
        """Return a copy of `graph` in which bytes cost `multipliers`; its arena may be thrown away."""
        priced = graph.copy()
        priced.arena = graph.arena.fork()
        if graph.weights is None:
            raise AssertionError("a graph with budgets has weights")
        key = multipliers.tobytes()
        for node in graph.nodes():
            (priced.costs[node],) = priced.arena.derive(
                "price",
                lambda costs, weights: (costs + multipliers @ weights,),
                graph.costs[node],
                graph.weights[node],
                key=key,
            )
        priced.constant += float(multipliers @ graph.weight_constant)
        priced.weights = None
        return priced

    def _refixed(self) -> Graph:
        graph, labels = self.graph.copy(), self.graph.num_labels()
        for _ in range(REFIX_ROUNDS if self.best is not None else 0):
            self._fix(graph)
            simplify(graph)
            # The first round may be weak; later ones must earn their time.
            if graph.num_labels() > 0.95 * labels or self.deadline.left() <= 0.0 or not graph.nodes():
                break
            labels = graph.num_labels()
        return graph

    def _fix(self, graph: Graph) -> None:
        """Remove labels whose bound exceeds the best plan, at several points of one ascent (one is weak)."""
        priced = self._priced(graph, self.multipliers)
        core, nodes = core_of(priced)
        if not nodes:
            return
        ascent = start_ascent(core)
        limit = self.objective() * (1.0 + 1e-10) - priced.constant + float(self.multipliers @ self.budgets)
        survives = np.ones(ascent.node_costs.size, dtype=bool)
        for _ in range(REFIX_LOOKS):
            for _ in range(REFIX_SWEEPS):
                ascent.sweep(True)
                ascent.sweep(False)
            bounds = ascent.label_bounds(ascent.shared_messages())
            survives &= bounds.bound + bounds.slack <= limit
            if self.deadline.left() <= 0.0:
                break
        for index, node in enumerate(nodes):
            kept = np.flatnonzero(survives[ascent.starts[index] : ascent.starts[index + 1]])
            if 0 < len(kept) < graph.size(node):
                graph.restrict(node, kept)

    def _branch(self, graph: Graph, seconds: float) -> mip.CoreSolution:
        """Solve what is left of `graph` within the budgets, by HiGHS; take the plan."""
        nodes = graph.nodes()
        if not nodes:
            plan = self.take(back_substitute(graph, {}))
            fits = self._fits(plan.usage)
            return mip.CoreSolution(
                labels=None, objective=plan.cost, bound=graph.constant, infeasible=not fits
            )
        core, _ = core_of(graph)
        arena, weights = core.arena, graph.weights or []
        found = mip.solve_core(
            [arena[token] for token in core.costs],
            [(u, v, arena[matrix]) for u, v, matrix in core.edges],
            time_limit=seconds,
            weights=[arena[weights[node]] for node in nodes],
            budgets=self.budgets - graph.weight_constant,
            relative_gap=min(self.gap, 1e-9),
        )
        if found.labels is not None:
            labels = {
                node: int(graph.domains[node][label]) for node, label in zip(nodes, found.labels, strict=True)
            }
            self.take(back_substitute(graph, labels))
        return mip.CoreSolution(
            labels=found.labels,
            objective=found.objective + graph.constant,
            bound=found.bound + graph.constant,
            infeasible=found.infeasible,
        )
