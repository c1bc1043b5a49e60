"""Better plans that fit, made of plans that are known.

    splice_plans     one plan up to a cut, another beyond it (`splice.py`)
    _fitting         mixtures of the labels of several plans, at prices where they begin to fit (`mixtures.py`)
    _repair          single moves into the budgets, then downhill (`local_search.py`)

Each looks at the rows that are active, and what it finds counts only within all rows (`Plans.take`).
"""

from __future__ import annotations

import numpy as np

from autopar.planner.solver.assignments import FITS
from autopar.planner.solver.budget_search import ENOUGH, BudgetSearch
from autopar.planner.solver.exact import value_of
from autopar.planner.solver.local_search import LocalSearch, is_worthwhile
from autopar.planner.solver.mixtures import Mixtures
from autopar.planner.solver.splice import splice

IMPROVE_ROUNDS = 4


def improve(search: BudgetSearch) -> None:
    """Look for better plans that fit, until a round finds none."""
    for number in range(IMPROVE_ROUNDS):
        before = search.plans.objective()
        for step in (activate_exceeded, splice_plans, _fitting, _repair):
            step(search)
            if search.finished():
                return
        if number and not search.plans.objective() < before * (1.0 - ENOUGH):
            break


def _fitting(search: BudgetSearch) -> None:
    """Take mixtures of good plans that fit."""
    good = [plan.labels for plan in search.plans.promising(search.multipliers, 6, 3)]
    Mixtures(search.graph, good).fitting(search.plans, search.multipliers)


def splice_plans(search: BudgetSearch) -> None:
    """Take the best splice of two good plans."""
    living = [
        plan.labels
        for plan in search.plans.promising(search.multipliers, 8, 4)
        if np.isfinite(value_of(search.graph, plan.labels))
    ]
    budgets = (search.plans.budgets - search.graph.weight_constant)[search.rows]
    spliced = splice(search.graph, living, search.rows, budgets, search.plans.accepts)
    if spliced is not None:
        search.plans.take(spliced)


def _repair(search: BudgetSearch) -> None:
    """Take good plans after single moves into the budgets."""
    if not is_worthwhile(search.relaxed()):
        return
    local = LocalSearch(search.relaxed(), search.rows)
    for plan in search.plans.promising(search.multipliers, 6, 2):
        labels = local.repaired(plan.labels)
        if labels is not None:
            search.plans.take(labels)


def activate_exceeded(search: BudgetSearch) -> None:
    """Activate the fullest row of the plans that beat the best and keep all active rows."""
    plans, rows = search.plans, set(search.rows.tolist())
    for plan in plans.known:
        excess = plans.excess(plan)
        if plan.cost < plans.objective() and (excess[search.rows] <= FITS).all() and excess.max() > FITS:
            rows.add(int(excess.argmax()))
    search.rows = np.array(sorted(rows))
