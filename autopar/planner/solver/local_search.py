"""Local search under budgets: single moves into the budgets, then downhill inside them.

While a budget is exceeded, the move of least cost per byte saved is made (`_into_budgets`); within the
budgets, the move that saves most seconds and still fits (`_downhill`). For all labels of all nodes at once
    totals[label] = c_v[i] + sum_u R_uv[x_u, i]
is kept up to date, so a move costs its neighbours' labels only.
"""

from __future__ import annotations

import numpy as np

from autopar.planner.solver.labelling import Floats, Integers
from autopar.planner.solver.relaxation import Relaxation

FITS = 1e-12
MOVES_PER_NODE = 4
MOST_WORK = 100_000_000
"""Moves times labels of one run: a move looks at all labels, and deep problems have a million."""
FEWEST_MOVES = 0.1
"""Moves per node that the work must allow: fewer change nothing that counts in a deep problem."""


def is_worthwhile(relaxation: Relaxation) -> bool:
    """Return whether a run may make enough moves to matter."""
    ascent = relaxation.ascent
    return MOST_WORK // len(ascent.node_costs) >= FEWEST_MOVES * len(ascent.sizes)


class LocalSearch:
    """Greedy moves of single nodes on the core: into the budgets by cost per byte, then downhill inside them."""

    def __init__(self, relaxation: Relaxation, rows: Integers) -> None:
        self.relaxation = relaxation
        core, ascent = relaxation.ascent.core, relaxation.ascent
        self.unpriced, self.weights = relaxation.unpriced, relaxation.bytes.in_rows(rows)
        self.budgets = relaxation.budgets[rows]
        self.starts, self.sizes = ascent.starts, ascent.sizes
        self.owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        self.units = np.maximum(np.abs(self.budgets), 1.0)
        self.around: list[list[tuple[int, Floats]]] = [[] for _ in core.costs]
        for u, v, matrix in core.edges:
            costs = core.arena[matrix]
            self.around[u].append((v, costs.T))
            self.around[v].append((u, costs))

    def repaired(self, labels: Integers) -> Integers | None:
        """Return original labels that fit, near these; None where the moves are stuck or a label is gone."""
        start = self.relaxation.positions(labels)
        found = None if start is None else self.run(start)
        return None if found is None else self.relaxation.original(found)

    def run(self, start: Integers) -> Integers | None:
        """Return positions that fit, after a few moves per node at most; None if none was reached."""
        self.chosen = start.copy()
        self.totals = self.unpriced.copy()
        for node, ends in enumerate(self.around):
            for other, costs in ends:
                self.totals[self.starts[node] : self.starts[node + 1]] += costs[self.chosen[other]]
        self.present = self.starts[:-1] + self.chosen
        self.usage = self.weights[:, self.present].sum(axis=1)
        for _ in range(min(MOVES_PER_NODE * len(self.sizes), MOST_WORK // len(self.owner))):
            excess = (self.usage - self.budgets) / self.units
            move = self._into_budgets(excess) if (excess > FITS).any() else self._downhill()
            if move is None:
                break
            self._apply(move)
        return self.chosen if ((self.usage - self.budgets) / self.units <= FITS).all() else None

    def _gain(self) -> Floats:
        return np.asarray(self.totals - self.totals[self.present][self.owner])

    def _change(self, rows: Integers) -> Floats:
        weights = self.weights[rows]
        return np.asarray((weights - weights[:, self.present][:, self.owner]) / self.units[rows, None])

    def _into_budgets(self, excess: Floats) -> int | None:
        over = np.flatnonzero(excess > FITS)
        after = np.maximum(excess[over, None] + self._change(over), 0.0).sum(axis=0)
        saved = excess[over].sum() - after
        useful = saved > FITS
        if not useful.any():
            return None
        # A move that costs nothing is taken at once; otherwise the least cost per byte.
        price = np.where(useful, np.maximum(self._gain(), 0.0) / np.where(useful, saved, 1.0), np.inf)
        return int(price.argmin())

    def _downhill(self) -> int | None:
        gain = self._gain()
        cheaper = np.flatnonzero(gain < -FITS * max(float(np.abs(self.unpriced).max()), 1e-300))
        for label in cheaper[np.argsort(gain[cheaper], kind="stable")].tolist():
            usage = self.usage + self.weights[:, label] - self.weights[:, self.present[self.owner[label]]]
            if ((usage - self.budgets) / self.units <= FITS).all():
                return int(label)
        return None

    def _apply(self, label: int) -> None:
        node = int(self.owner[label])
        before, after = int(self.chosen[node]), label - int(self.starts[node])
        self.usage = self.usage + self.weights[:, label] - self.weights[:, self.present[node]]
        self.chosen[node], self.present[node] = after, label
        for other, costs in self.around[node]:
            self.totals[self.starts[other] : self.starts[other + 1]] += costs[:, after] - costs[:, before]
