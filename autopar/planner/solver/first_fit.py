"""A first plan that fits: at a price that is high enough, else the one of least bytes; or the proof that none fits.

seek_price     row exceeded most -> 1 objective per budget -> 8 -> 64 ..          until a plan fits
               a price that it has -> 1.1 of it -> 1.6 -> 7.4 ..
seek_fit       least bytes of one exceeded row, of the next, at last of all rows together (`least_bytes.py`)
"""

from __future__ import annotations

import numpy as np

from autopar.planner.solver.assignments import FITS
from autopar.planner.solver.budget_search import BudgetSearch
from autopar.planner.solver.labelling import is_forbidden
from autopar.planner.solver.least_bytes import EXACT, least_bytes, seek_joint_fit

PRICE_RISES, PRICE_RISE, LEAST_RISE = 6, 8.0, 1.1
"""How often, and by what factor, the price of a row that no plan keeps is raised; a price that an answer to a similar
problem had, which is near, by LEAST_RISE at first."""
SINGLE_ROWS = 4
"""So many rows are looked at alone for the least that they need, before all exceeded ones together."""


def seek_price(search: BudgetSearch) -> None:
    """Raise the price of the row that is exceeded most until a plan fits: far faster than the least bytes.

    The first price of a row that has none makes the budget worth the objective without budgets.
    """
    plans = search.plans
    multipliers, rise = search.multipliers.copy(), LEAST_RISE
    first = max(abs(search.bound), max(abs(plan.cost) for plan in plans.known)) if plans.known else 0.0
    for _ in range(PRICE_RISES if first else 0):
        latest = plans.known[-1]
        number = int(plans.excess(latest).argmax())
        if multipliers[number] > 0.0:
            multipliers[number] *= rise
            rise = min(rise**4, PRICE_RISE)
        else:
            multipliers[number] = first / plans.units[number]
            rise = PRICE_RISE
        search.price(multipliers.copy())
        if plans.best is not None or search.deadline.left() <= 0.0:
            break


def seek_fit(search: BudgetSearch) -> None:
    """Find a plan that fits, or prove that there is none."""
    plans = search.plans
    tried: list[int] = []
    while plans.best is None and len(tried) < SINGLE_ROWS and search.deadline.left() > 0.0:
        excess = plans.worst_excess()
        excess[tried] = 0.0
        number = int(excess.argmax())
        if excess[number] <= FITS:
            break
        tried.append(number)
        row = search.original.memory_rows[number]
        outcome, proven = least_bytes(search.original, row, search.deadline)
        plan = plans.take(outcome.assignment)
        short = plan.usage[number] > plans.budgets[number] + EXACT * plans.units[number]
        if proven and (short or is_forbidden(np.asarray(plan.cost))):
            search.infeasible, plans.best = True, plan
            search.statistics |= {
                "minimum_bytes": float(plan.usage[number]) + row.constant_bytes,
                "memory_row": row.name,
            }
    if plans.best is None and search.deadline.left() > 0.0:
        _seek_joint_fit(search, np.flatnonzero(plans.worst_excess() > FITS).tolist())


def _seek_joint_fit(search: BudgetSearch, rows: list[int]) -> None:
    least = seek_joint_fit(search.original, search.plans, rows, search.deadline)
    if search.plans.best is None and least > EXACT:
        nothing_fits(search)
        search.statistics["joint_excess"] = least


def nothing_fits(search: BudgetSearch) -> None:
    """End the search: say which memory row is short, and by how much."""
    plan = search.plans.answer()
    number = int(search.plans.excess(plan).argmax())
    row = search.original.memory_rows[number]
    search.infeasible = True
    search.statistics |= {
        "infeasible": "no assignment fits all rows together",
        "needed_bytes": float(plan.usage[number]) + row.constant_bytes,
        "memory_row": row.name,
    }
