"""Directions of prices: the few combinations of rows along which multipliers move.

A hundred multipliers that a linear program chooses freely jump about: thirty cuts say little in a hundred dimensions.
Here they are sums of few directions, each a mixture of rows with weights that sum to 1:

    one row         the moment that is fullest
    an excess       all rows by which an assignment exceeds the budgets, weighed by how much

A buffer that every layer needs for itself exceeds a hundred rows a little, each in its own layer; only prices of all of
these rows together make all layers do without it.
"""

from __future__ import annotations

import numpy as np

from autopar.planner.solver.assignments import FITS, Assigned, Plans
from autopar.planner.solver.labelling import Floats

SAME = 0.02
"""A direction that differs by less from a known one, in the sum over rows, is not added."""


class Directions:
    """The directions of one ascent, (n, rows)."""

    def __init__(self, plans: Plans) -> None:
        self.plans = plans
        self.known: Floats = np.zeros((0, len(plans.budgets)))

    def master(self) -> tuple[float, Floats]:
        """Return (upper bound on max L along the directions, the multipliers that attain it)."""
        if not len(self.known):
            return -np.inf, np.zeros(len(self.plans.budgets))
        return self.plans.master(self.known)

    def add(self, multipliers: Floats) -> bool:
        """Add the direction of multipliers in seconds per byte; return whether it is new."""
        worth = multipliers * self.plans.units
        if not worth.any():
            return False
        direction = worth / worth.sum()
        if len(self.known) and np.abs(self.known - direction).sum(axis=1).min() < SAME:
            return False
        self.known = np.vstack([self.known, direction])
        return True

    def add_excess(self, plan: Assigned) -> None:
        """Add the fullest row of an assignment that exceeds budgets, and all its rows by their excess."""
        excess = self.plans.excess(plan)
        if excess.max() > FITS:
            fullest = np.where(np.arange(len(excess)) == excess.argmax(), excess, 0.0)
            for direction in (fullest, excess):
                self.add(direction / self.plans.units)

    def add_row(self, tolerance: float, bound: float) -> bool:
        """Add the row that would raise the bound most by the assignments that are known, if any would."""
        exceeded = np.flatnonzero(self.plans.worst_excess() > FITS)
        if not len(exceeded):
            return False
        value, multipliers = self.plans.master(np.eye(len(self.plans.budgets))[exceeded])
        worth = multipliers * self.plans.units
        worth[_single_rows(self.known)] = 0.0
        if value - bound <= tolerance * abs(value) or not worth.any():
            return False
        return self.add(np.where(np.arange(len(worth)) == worth.argmax(), multipliers, 0.0))


def _single_rows(directions: Floats) -> np.ndarray:
    """Mark the rows that are a direction alone."""
    alone = np.count_nonzero(directions, axis=1) == 1
    return np.asarray(directions[alone].any(axis=0))
