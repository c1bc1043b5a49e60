"""Budgets: a Lagrangian bound, assignments that fit on the way, then branch and bound.

Pricing bytes at multipliers lam >= 0 (seconds per byte) gives a problem without budgets, and for every lam a
bound:
    L(lam) = min_x  c(x) + lam.(m(x) - M)  <=  optimum within the budgets M.
1. lam = 0: the optimum without budgets (`_Search.without_budgets`). If it fits, it is the answer.
2. `seek_fit`: the least bytes of each exceeded row, then of all together; a plan that fits, or the proof that
   none does.
3. `ascend`: messages and multipliers rise together (`relaxation.py`). Which lam comes next is said by the
   assignments met so far, which bound max L from above (`Plans.master`); rows that no assignment exceeded
   keep multiplier 0, so a hundred slack rows cost nothing. Labels whose bound exceeds the best plan go.
4. `improve`: plans that fit, from mixtures of good labels (`mixtures.py`), splices of two plans
   (`splice.py`), and single moves (`local_search.py`).
5. `close`: labels are removed by reduced costs until HiGHS can finish what is left.

The certificate proves the best bound of 1. and 3.; what 5. adds is HiGHS' word. What remains between max L and
the optimum is the duality gap; it shrinks with the number of layers (relative 1e-3 .. 1e-5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.planner.solver import mip
from autopar.planner.solver.active_rows import first_rows, graph_of
from autopar.planner.solver.deadline import Deadline
from autopar.planner.solver.exact import Proof, core_of, solve_graph, start_ascent, value_of
from autopar.planner.solver.least_bytes import EXACT, least_bytes, seek_joint_fit
from autopar.planner.solver.lifting import FEWEST_NODES
from autopar.planner.solver.local_search import LocalSearch
from autopar.planner.solver.mixtures import Mixtures, priced, restricted
from autopar.planner.solver.plans import FITS, Plans
from autopar.planner.solver.problem import Floats, Integers, Problem, is_forbidden
from autopar.planner.solver.reductions import Graph, back_substitute, simplify
from autopar.planner.solver.relaxation import Look, Relaxation
from autopar.planner.solver.repeats import shorten
from autopar.planner.solver.solution import Warmth
from autopar.planner.solver.splice import splice

MAX_LOOKS, SWEEPS, LAST_SWEEPS = 30, 10, 40
ASCENT_TOLERANCE = 1e-5
"""The ascent of multipliers ends when master and bound agree to this, relatively, or to a tenth of the gap."""
PRICE_RISES, PRICE_RISE = 6, 8.0
"""How often, and by what factor, the price of a row that no plan keeps is raised."""
SHORT_PART = 0.23
"""Above this part of the nodes a short copy is too long for a solve at every price: a few sweeps do as well."""
PRICE_GAP = 0.1
"""A solve at one price stops at this part of the gap."""
FIRST_STEP = 0.1
"""The least-bytes plan is so slow that the first price of the master is far too high: start at this part."""
SINGLE_ROWS = 4
"""So many rows are looked at alone for the least that they need, before all exceeded ones together."""
IMPROVE_ROUNDS, ENOUGH = 4, 1e-5
RECOMBINE_SECONDS, CLOSE_SECONDS = 30.0, 60.0
RECOMBINE_LABELS, CLOSE_LABELS = 6_000, 15_000
"""HiGHS is not started above this many labels: it would find nothing in the time."""
REFIX_ROUNDS, REFIX_LOOKS, REFIX_SWEEPS = 8, 2, 15


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


def solve_within_budgets(
    problem: Problem,
    *,
    original: Problem,
    gap: float,
    deadline: Deadline,
    warm_start: Integers | None,
    warm_multipliers: Sequence[float] | None,
) -> BudgetedOutcome:
    """Minimise the cost within all memory rows. `problem` is `original` with costs cut at a ceiling."""
    search = _Search(problem, original, gap, deadline)
    if warm_start is not None:
        search.plans.take(warm_start)
    if warm_multipliers is not None and any(value > 0.0 for value in warm_multipliers) and search.graph.nodes():
        # An older price is a better start than none: its bound is near, and lam = 0 need not be solved.
        search.look(np.maximum(np.array(warm_multipliers, dtype=np.float64), 0.0), SWEEPS)
    else:
        search.without_budgets(warm_start)
    if search.plans.best is None and search.graph.nodes():
        search.seek_price()
    if search.plans.best is None:
        search.seek_fit()
    if search.infeasible or search.finished() or not search.graph.nodes():
        return search.outcome()
    search.ascend()
    for step in (search.improve, search.polish, search.recombine, search.close):
        if search.finished():
            break
        step()
    return search.outcome()


class _Search:
    """The state of one solve: assignments met, the bound, the multipliers and their proof."""

    def __init__(self, problem: Problem, original: Problem, gap: float, deadline: Deadline) -> None:
        self.original, self.gap, self.deadline = original, gap, deadline
        self.plans = Plans(original)
        self.problem = problem
        self.priced = np.zeros(len(problem.memory_rows), dtype=bool)
        self.activate(first_rows(problem))
        self.bound = -np.inf
        self.multipliers: Floats = np.zeros(len(problem.memory_rows))
        self.proof = Proof(bound=-np.inf, steps=(), messages=np.zeros(0), eliminated=False)
        self.infeasible = False
        self.statistics: dict[str, float | int | str] = {"method": "lagrangian", "prices": 0}

    def activate(self, rows: Integers) -> None:
        """Build the graph with these rows; what is proven stays so."""
        self.rows = rows
        self.graph = graph_of(self.problem, rows.tolist())
        self.budgets = self.plans.budgets[rows]
        self.relaxation: Relaxation | None = None
        self.removed = np.zeros(0, dtype=bool)
        self.repeats = self._is_deep()

    def _is_deep(self) -> bool:
        """Return whether lifting solves a price to the end in the time of a few sweeps."""
        nodes = len(self.graph.nodes())
        short = shorten(core_of(self.graph)[0]) if nodes >= FEWEST_NODES else None
        return short is not None and len(short.core.costs) <= SHORT_PART * nodes

    def need(self, multipliers: Floats) -> None:
        """Activate the rows that have a price."""
        self.priced |= multipliers > 0.0
        rows = np.union1d(self.rows, np.flatnonzero(multipliers))
        if len(rows) > len(self.rows):
            self.activate(rows)

    def finished(self) -> bool:
        """Return whether the gap is reached or time is up."""
        best = self.plans.objective()
        return best - self.bound <= self.gap * abs(best) < np.inf or self.deadline.left() <= 0.0

    def without_budgets(self, warm_start: Integers | None) -> None:
        """Solve at multipliers 0: a bound, and the answer if it fits."""
        outcome = solve_graph(
            priced(self.graph, np.zeros(len(self.rows))),
            gap=max(0.1 * self.gap, EXACT),
            deadline=self.deadline,
            pool=() if warm_start is None else (warm_start,),
        )
        for labels in [*outcome.pool[-4:], outcome.assignment]:
            self.plans.take(labels)
        self.proof = outcome.proof
        self.bound = max(self.bound, outcome.bound)

    def seek_price(self) -> None:
        """Raise the price of the row that is exceeded most until a plan fits: far faster than the least bytes.

        The first price makes the budget worth the objective without budgets.
        """
        plans = self.plans
        multipliers = np.zeros(len(plans.budgets))
        first = max(abs(self.bound), max(abs(plan.cost) for plan in plans.known)) if plans.known else 0.0
        for _ in range(PRICE_RISES if first else 0):
            latest = plans.known[-1]
            number = int(plans.excess(latest).argmax())
            multipliers[number] = max(PRICE_RISE * multipliers[number], first / plans.units[number])
            self.price(multipliers.copy())
            if plans.best is not None or self.deadline.left() <= 0.0:
                break

    def price(self, multipliers: Floats) -> None:
        """Solve at these multipliers to the gap that counts: a bound, assignments, and a proof."""
        self.need(multipliers)
        outcome = solve_graph(
            priced(self.graph, multipliers[self.rows]), gap=max(PRICE_GAP * self.gap, EXACT), deadline=self.deadline
        )
        for labels in [*outcome.pool[-4:], outcome.assignment]:
            self.plans.take(labels)
        bound = outcome.bound - float(multipliers @ self.plans.budgets)
        if bound > self.bound:
            self.bound, self.proof, self.multipliers = bound, outcome.proof, multipliers
        self.statistics["prices"] = int(self.statistics["prices"]) + 1

    def seek_fit(self) -> None:
        """Find a plan that fits, or prove that there is none."""
        plans = self.plans
        tried: list[int] = []
        while plans.best is None and len(tried) < SINGLE_ROWS and self.deadline.left() > 0.0:
            excess = plans.worst_excess()
            excess[tried] = 0.0
            number = int(excess.argmax())
            if excess[number] <= FITS:
                break
            tried.append(number)
            row = self.original.memory_rows[number]
            outcome, proven = least_bytes(self.original, row, self.deadline)
            plan = plans.take(outcome.assignment)
            short = plan.usage[number] > plans.budgets[number] + EXACT * plans.units[number]
            if proven and (short or is_forbidden(np.asarray(plan.cost))):
                self.infeasible, plans.best = True, plan
                self.statistics |= {
                    "minimum_bytes": float(plan.usage[number]) + row.constant_bytes,
                    "memory_row": row.name,
                }
        if plans.best is None and self.deadline.left() > 0.0:
            self._seek_joint_fit(np.flatnonzero(plans.worst_excess() > FITS).tolist())

    def _seek_joint_fit(self, rows: list[int]) -> None:
        least = seek_joint_fit(self.original, self.plans, rows, self.deadline)
        if self.plans.best is None and least > EXACT:
            self._nothing_fits()
            self.statistics["joint_excess"] = least

    def _nothing_fits(self) -> None:
        plan = self.plans.answer()
        number = int(self.plans.excess(plan).argmax())
        row = self.original.memory_rows[number]
        self.infeasible = True
        self.statistics |= {
            "infeasible": "no assignment fits all rows together",
            "needed_bytes": float(plan.usage[number]) + row.constant_bytes,
            "memory_row": row.name,
        }

    def ascend(self) -> None:
        """Raise L(lam) until the master agrees, the gap is closed, or time is up."""
        tried: list[Floats] = []
        stalls = 0
        priced_rows = np.flatnonzero(self.priced).tolist()
        while int(self.statistics["prices"]) < MAX_LOOKS and not self.finished() and stalls < 2:
            tolerance = max(ASCENT_TOLERANCE, 0.1 * self.gap)
            value, multipliers = self.plans.master(priced_rows) if priced_rows else (-np.inf, self.multipliers)
            if value - self.bound <= tolerance * abs(value):
                # These rows have their price. Is the best mixture good enough, or would another row raise the bound?
                self.improve()
                if self.finished():
                    break
                value, multipliers = self.plans.master(np.flatnonzero(self.plans.worst_excess() > FITS).tolist())
                worth = multipliers * self.plans.units
                worth[priced_rows] = 0.0
                if value - self.bound <= tolerance * abs(value) or not worth.any():
                    break
                priced_rows.append(int(worth.argmax()))
                continue
            multipliers = self._moderate(multipliers)
            # Once more at the same place helps the messages; a third time nothing.
            stalls += any(np.allclose(multipliers, known, rtol=1e-3, atol=0.0) for known in tried)
            tried.append(multipliers)
            if self.repeats:
                self.price(multipliers)
            else:
                self.look(multipliers, SWEEPS)

    def _moderate(self, multipliers: Floats) -> Floats:
        if not self.multipliers.any():
            return FIRST_STEP * multipliers
        # Duals of several rows jump between vertices; half-way from the best point they settle.
        return 0.5 * (multipliers + self.multipliers) if np.count_nonzero(multipliers) > 1 else multipliers

    def look(self, multipliers: Floats, sweeps: int) -> None:
        """Ascend at these multipliers: a bound, and assignments."""
        self.need(multipliers)
        look = self.relaxed().look(multipliers[self.rows], sweeps, self.deadline)
        for labels in look.assignments:
            self.plans.take(labels)
        self._mix(multipliers)
        self._prove(look, multipliers)
        self.statistics["prices"] = int(self.statistics["prices"]) + 1

    def _mix(self, multipliers: Floats) -> None:
        """Take the best mixture of good assignments at these multipliers."""
        if self.deadline.left() > 0.0 and self.plans.known:
            good = [plan.labels for plan in self.plans.promising(multipliers, 6, 0)]
            labels = Mixtures(self.graph, good).at(multipliers[self.rows])
            if labels is not None:
                self.plans.take(labels)

    def relaxed(self) -> Relaxation:
        """Return the relaxation of the active rows."""
        if self.relaxation is None:
            self.relaxation = Relaxation(self.graph, self.budgets)
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

    def improve(self) -> None:
        """Look for better plans that fit, until a round finds none."""
        for number in range(IMPROVE_ROUNDS):
            before = self.plans.objective()
            for step in (self._activate_exceeded, self._fitting, self._splice, self._repair):
                step()
                if self.finished():
                    return
            if number and not self.plans.objective() < before * (1.0 - ENOUGH):
                break

    def _fitting(self) -> None:
        """Take mixtures of good plans that fit."""
        good = [plan.labels for plan in self.plans.promising(self.multipliers, 6, 3)]
        Mixtures(self.graph, good).fitting(self.plans, self.multipliers[self.rows])

    def _splice(self) -> None:
        """Take the best splice of two good plans."""
        living = [
            plan.labels
            for plan in self.plans.promising(self.multipliers, 8, 4)
            if np.isfinite(value_of(self.graph, plan.labels))
        ]
        spliced = splice(self.graph, living, self.budgets - self.graph.weight_constant, self.plans.accepts)
        if spliced is not None:
            self.plans.take(spliced)

    def _repair(self) -> None:
        """Take good plans after single moves into the budgets."""
        local = LocalSearch(self.relaxed())
        for plan in self.plans.promising(self.multipliers, 6, 2):
            labels = local.repaired(plan.labels)
            if labels is not None:
                self.plans.take(labels)

    def _activate_exceeded(self) -> None:
        """Activate the fullest row of the plans that beat the best and keep all active rows."""
        plans, rows = self.plans, set(self.rows.tolist())
        for plan in plans.known:
            excess = plans.excess(plan)
            if plan.cost < plans.objective() and (excess[self.rows] <= FITS).all() and excess.max() > FITS:
                rows.add(int(excess.argmax()))
        if len(rows) > len(self.rows):
            self.activate(np.array(sorted(rows)))

    def polish(self) -> None:
        """Raise the bound at the best multipliers, and improve once more."""
        self.look(self.multipliers, LAST_SWEEPS)
        if not self.finished():
            self.improve()

    def recombine(self) -> None:
        """Solve, by HiGHS, the problem restricted to the labels of good plans."""
        good = [plan.labels for plan in self.plans.promising(self.multipliers, 12, 4)]
        trial = restricted(self.graph, good)
        if trial.num_labels() <= RECOMBINE_LABELS:
            self._branch(trial, min(RECOMBINE_SECONDS, self.deadline.left()))

    def close(self) -> None:
        """Let HiGHS finish; again while what it finds exceeds a row that was not active."""
        active = 0
        while len(self.rows) > active and not self.finished():
            active = len(self.rows)
            self._close_once()
            self._activate_exceeded()

    def _close_once(self) -> None:
        """Remove labels by their bounds at the best multipliers, then let HiGHS finish."""
        graph = self._refixed()
        self.statistics |= {"method": "branch and bound", "core_labels": graph.num_labels()}
        if graph.num_labels() > CLOSE_LABELS or self.deadline.left() <= 0.0:
            return
        found = self._branch(graph, min(CLOSE_SECONDS, self.deadline.left()))
        if found.infeasible and self.plans.best is None:
            self._nothing_fits()
        # Removed labels cost more than the best plan, so the bound of the rest counts up to that plan.
        bound = np.inf if found.infeasible else found.bound
        self.bound = max(self.bound, min(bound, self.plans.objective()))

    def outcome(self) -> BudgetedOutcome:
        """Return what was found."""
        if self.plans.best is None and not self.infeasible:
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

    def _refixed(self) -> Graph:
        graph = self.graph.copy()
        if self.relaxation is not None:
            starts = self.relaxation.ascent.starts
            for index, node in enumerate(self.relaxation.nodes):
                kept = np.flatnonzero(~self.removed[starts[index] : starts[index + 1]])
                if 0 < len(kept) < graph.size(node):
                    graph.restrict(node, kept)
            simplify(graph)
        labels = graph.num_labels()
        for _ in range(REFIX_ROUNDS if self.plans.best is not None else 0):
            if not graph.nodes() or self.deadline.left() <= 0.0:
                break
            self._fix(graph)
            simplify(graph)
            # The first round may be weak; later ones must earn their time.
            if graph.num_labels() > 0.95 * labels:
                break
            labels = graph.num_labels()
        return graph

    def _fix(self, graph: Graph) -> None:
        """Remove labels whose bound exceeds the best plan, at several points of one ascent (one is weak)."""
        core, nodes = core_of(priced(graph, self.multipliers[self.rows]))
        if not nodes:
            return
        ascent = start_ascent(core)
        constant = graph.constant + float(self.multipliers[self.rows] @ (graph.weight_constant - self.budgets))
        limit = self.plans.objective() * (1.0 + 1e-10) - constant
        survives = np.ones(ascent.node_costs.size, dtype=bool)
        for _ in range(REFIX_LOOKS):
            for _ in range(REFIX_SWEEPS):
                ascent.sweep(True)
                ascent.sweep(False)
            bounds = ascent.label_bounds(ascent.shared_messages())
            survives &= bounds.bound + bounds.slack <= limit
            # With every label of a smaller problem at hand, its bound is a bound of the whole.
            self.bound = max(self.bound, min(bounds.bound + constant, self.plans.objective()))
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
            plan = self.plans.take(back_substitute(graph, {}))
            fits = bool((plan.usage[self.rows] <= self.budgets + FITS * self.plans.units[self.rows]).all())
            return mip.CoreSolution(labels=None, objective=plan.cost, bound=graph.constant, infeasible=not fits)
        core, _ = core_of(graph)
        arena, weights = core.arena, graph.weights or []
        found = mip.solve_core(
            [arena[token] for token in core.costs],
            [(u, v, arena[matrix]) for u, v, matrix in core.edges],
            time_limit=seconds,
            weights=[arena[weights[node]] for node in nodes],
            budgets=self.budgets - graph.weight_constant,
            relative_gap=min(self.gap, 1e-9),
            stop=self.deadline.stop,
        )
        if found.labels is not None:
            labels = {node: int(graph.domains[node][label]) for node, label in zip(nodes, found.labels, strict=True)}
            self.plans.take(back_substitute(graph, labels))
        return mip.CoreSolution(
            labels=found.labels,
            objective=found.objective + graph.constant,
            bound=found.bound + graph.constant,
            infeasible=found.infeasible,
        )
