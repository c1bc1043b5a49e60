"""The ascent of prices: which multipliers are looked at next, and when to look for better plans between.

The assignments met so far bound max L(lam) from above; where that bound is highest is the next price (`directions.py`
keeps the choice to few dimensions). Half-way between it and the best price known, several rows settle.

    lam 0: 9.03 -> 1.13: 10.76 -> 4.08: 11.33 -> (3.06, 1.27): 11.33 -> (2.06, .., 0.02): 11.44 -> ..
"""

from __future__ import annotations

import numpy as np

from autopar.planner.solver.better_plans import activate_exceeded, improve, splice_plans
from autopar.planner.solver.budget_search import ENOUGH, SWEEPS, BudgetSearch
from autopar.planner.solver.labelling import Floats

MOST_PRICES, FEW_LOOKS, MANY_LOOKS = 60, 8, 30
"""Prices of one solve; those between two searches for better plans, where layers repeat and elsewhere."""
ASCENT_TOLERANCE = 1e-5
"""The ascent of multipliers ends when master and bound agree to this, relatively, or to a tenth of the gap."""


def climb(search: BudgetSearch) -> None:
    """Raise the bound and look for better plans by turns, until neither moves. Where layers repeat, plans are spliced
    behind every look."""
    if search.is_deep and search.multipliers.any():
        # The price of a similar problem: its plan, which may just not fit, and one that fits are near the optimum.
        activate_exceeded(search)
        splice_plans(search)
    while not search.finished() and int(search.statistics["prices"]) < MOST_PRICES:
        bound, objective = search.bound, search.plans.objective()
        ascend(search, FEW_LOOKS if search.is_deep else MANY_LOOKS)
        if not search.is_deep and not search.finished():
            improve(search)
        is_higher = search.bound > bound + ENOUGH * abs(bound)
        if not is_higher and not search.plans.objective() < objective * (1.0 - ENOUGH):
            break
    if search.is_deep and not search.finished():
        improve(search)


def ascend(search: BudgetSearch, looks: int) -> None:
    """Raise L(lam) until the master agrees, the gap is closed, or for so many looks."""
    directions = search.directions
    directions.add(search.multipliers)
    directions.add_excess(search.plans.cheapest_at(search.multipliers))
    end, stalls = int(search.statistics["prices"]) + looks, 0
    tried: list[Floats] = []
    while int(search.statistics["prices"]) < end and not search.finished() and stalls < 2:
        tolerance = max(ASCENT_TOLERANCE, 0.1 * search.gap)
        value, multipliers = directions.master()
        if value - search.bound <= tolerance * abs(value):
            # These directions have their price. Would another one raise the bound?
            if not directions.add_row(tolerance, search.bound):
                break
            continue
        multipliers = _moderate(search, multipliers)
        # Once more at the same place helps the messages; a third time nothing.
        stalls += any(np.allclose(multipliers, known, rtol=1e-3, atol=0.0) for known in tried)
        tried.append(multipliers)
        search.look(multipliers, SWEEPS)
        if search.is_deep and not search.finished():
            activate_exceeded(search)
            splice_plans(search)  # a look takes ten times as long, and a splice is often the answer
        directions.add_excess(search.plans.cheapest_at(multipliers))


def _moderate(search: BudgetSearch, multipliers: Floats) -> Floats:
    if not search.multipliers.any() and search.first_step < 1.0:
        return search.first_step * multipliers
    # Duals of several rows jump between vertices; half-way from the best point they settle.
    return 0.5 * (multipliers + search.multipliers) if np.count_nonzero(multipliers) > 1 else multipliers
