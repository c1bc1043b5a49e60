"""Budgets: a Lagrangian bound, assignments that fit on the way, then branch and bound.

Pricing bytes at multipliers lam >= 0 (seconds per byte) gives a problem without budgets, and for every lam a
bound:
    L(lam) = min_x  c(x) + lam.(m(x) - M)  <=  optimum within the budgets M.
1. lam = 0: the optimum without budgets (`BudgetSearch.without_budgets`). If it fits, it is the answer.
2. `first_fit.py`: a price at which a plan fits, else the least bytes of each exceeded row, then of all together; a plan
   that fits, or the proof that none does.
3. `price_ascent.climb`: messages and multipliers rise together (`relaxation.py`). Which lam comes next is said by the
   assignments met so far, which bound max L from above (`Plans.master`). Labels whose bound exceeds the best plan go.
4. `better_plans.improve`: plans that fit, from mixtures of good labels (`mixtures.py`), splices of two plans
   (`splice.py`), and single moves (`local_search.py`).
5. `closing.close`: labels are removed by reduced costs until HiGHS can finish what is left.

The certificate proves the best bound of 1. and 3.; what 5. adds is HiGHS' word. What remains between max L and
the optimum is the duality gap; it shrinks with the number of layers (relative 1e-3 .. 1e-5).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.planner.solver.budget_search import SWEEPS, BudgetedOutcome, BudgetSearch
from autopar.planner.solver.closing import close, polish, recombine
from autopar.planner.solver.deadline import Deadline
from autopar.planner.solver.first_fit import seek_fit, seek_price
from autopar.planner.solver.labelling import Integers, Problem
from autopar.planner.solver.price_ascent import climb

FIRST_STEP = 0.1
"""The least-bytes plan is so slow that the first price of the master is far too high: start at this part."""


def solve_within_budgets(
    problem: Problem,
    *,
    original: Problem,
    gap: float,
    deadline: Deadline,
    warm_start: Integers | None,
    warm_multipliers: Sequence[float] | None,
    stop_above: float = np.inf,
) -> BudgetedOutcome:
    """Minimise the cost within all memory rows, or find a bound above `stop_above`. `problem` is `original` with costs
    cut at a ceiling."""
    search = BudgetSearch(problem, original, gap, deadline, stop_above)
    if warm_start is not None:
        search.plans.take(warm_start)
    if warm_multipliers is not None and any(value > 0.0 for value in warm_multipliers) and search.graph.nodes():
        # An older price is a better start than none: its bound is near, and lam = 0 need not be solved.
        search.look(np.maximum(np.array(warm_multipliers, dtype=np.float64), 0.0), SWEEPS)
    else:
        search.without_budgets(warm_start)
    if search.bound > stop_above:
        return search.outcome()
    if search.plans.best is None and search.graph.nodes():
        seek_price(search)
    if search.plans.best is None:
        seek_fit(search)
        search.first_step = FIRST_STEP
    if search.infeasible or search.finished() or not search.graph.nodes() or not search.plans.known:
        return search.outcome()
    for step in (climb, polish, recombine, close):
        if search.finished():
            break
        step(search)
    return search.outcome()
