"""Rows that bind: of a hundred memory rows a graph carries the few that can have a price.

A row left out is a constraint left out: bounds stay valid (its multiplier is 0), and labels that only it could tell
apart become equal, so reductions are stronger and equal layers stay equal. Assignments are judged by all rows
(`assignments.py`); where a good one exceeds a row that is not active, the graph is built again with that row.

    128 rows "backward k"   ->   first_rows: (0, 127)   ->   a mixture is fullest at 63: (0, 63, 127)
"""

from __future__ import annotations

import numpy as np

from autopar.planner.solver.labelling import Integers, Problem

FEW = 8
"""So many rows are all active from the start."""


def first_rows(problem: Problem) -> Integers:
    """Return the rows to begin with: all of a few, else the first, the last, and those that could be fullest."""
    rows = problem.memory_rows
    if len(rows) <= FEW:
        return np.arange(len(rows))
    shared = {id(values): values for row in rows for values in row.bytes.values()}
    means = {identity: float(values.mean()) for identity, values in shared.items()}
    fullest = [
        sum(means[id(values)] for values in row.bytes.values()) + row.constant_bytes - row.budget_bytes for row in rows
    ]
    return np.unique([0, len(rows) - 1, int(np.argmax(fullest))])
