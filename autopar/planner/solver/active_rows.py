"""Rows that bind: of a hundred memory rows a graph carries the few that can have a price.

A row left out is a constraint left out: bounds stay valid (its multiplier is 0), and labels that only it could tell
apart become equal, so reductions are stronger and equal layers stay equal. Assignments are judged by all rows
(`plans.py`); where a good one exceeds a row that is not active, the graph is built again with that row.

    128 rows "backward k"   ->   first_rows: (0, 127)   ->   a mixture is fullest at 63: (0, 63, 127)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.planner.solver.arena import Arena
from autopar.planner.solver.problem import Floats, Integers, Problem
from autopar.planner.solver.reductions import Graph, simplify

FEW = 8
"""So many rows are all active from the start."""


def first_rows(problem: Problem) -> Integers:
    """Return the rows to begin with: all of a few, else the first, the last, and those that could be fullest."""
    rows = problem.memory_rows
    if len(rows) <= FEW:
        return np.arange(len(rows))
    fullest = [
        sum(float(values.mean()) for values in row.bytes.values()) + row.constant_bytes - row.budget_bytes
        for row in rows
    ]
    return np.unique([0, len(rows) - 1, int(np.argmax(fullest))])


def graph_of(problem: Problem, rows: Sequence[int]) -> Graph:
    """Return the reduced graph of `problem` whose weights are the bytes of these rows, (rows, d)."""
    active = [problem.memory_rows[number].bytes for number in rows]
    weights: list[Floats] = []
    for node, costs in enumerate(problem.node_costs):
        nothing = np.zeros(len(costs))
        weights.append(np.array([entries.get(node, nothing) for entries in active]))
    edges = [(edge.source, edge.target, edge.costs) for edge in problem.edges]
    graph = Graph(Arena(), problem.node_costs, edges, weights)
    simplify(graph)
    return graph
