"""What is the least that an assignment can use? Bytes as costs, over one row or over several jointly.

One row: a problem without budgets whose node costs are bytes (`least_bytes`). Several rows: the least largest
excess e obeys, for all weights mu >= 0 with sum 1,
    e  >=  min_x sum_k mu_k (usage_k(x) - budget_k) / unit_k,
so a positive right side proves that nothing fits all rows together, and the minimisers are the assignments to
try (`seek_joint_fit`, mu by multiplicative weights: rows that are exceeded weigh more next time).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.planner.solver.arena import Arena
from autopar.planner.solver.assignments import FITS, Plans
from autopar.planner.solver.deadline import Deadline
from autopar.planner.solver.exact import ExactOutcome, solve_graph
from autopar.planner.solver.labelling import Floats, MemoryRow, Problem, is_forbidden
from autopar.planner.solver.reductions import Graph
from autopar.planner.solver.solution import relative_gap

EXACT = 1e-9
JOINT_ROUNDS = 30
STEP = 4.0
"""How strongly an excess, relative to the largest, raises the weight of its row."""


def least_bytes(problem: Problem, row: MemoryRow, deadline: Deadline) -> tuple[ExactOutcome, bool]:
    """Return the assignment that uses the least of one row (objective: bytes), and whether that is proven.

    Communication does not count, but FORBIDDEN choices stay forbidden: they cost more bytes than all nodes
    together.
    """
    weights = [row.bytes.get(node, np.zeros(len(costs))) for node, costs in enumerate(problem.node_costs)]
    outcome = _least(problem, weights, deadline)
    return outcome, relative_gap(outcome.objective, outcome.bound) <= 2 * EXACT


def seek_joint_fit(problem: Problem, plans: Plans, rows: Sequence[int], deadline: Deadline) -> float:
    """Let `plans` take assignments that are small in all `rows` together, until one fits.

    Returns a proven lower bound on the largest excess, in budgets: positive when nothing fits them all.
    """
    if not rows:
        return -np.inf
    numbers = list(rows)
    usage = [_row_weights(problem, number) for number in numbers]
    mixture, proven = np.full(len(numbers), 1.0 / len(numbers)), -np.inf
    for _ in range(JOINT_ROUNDS):
        scaled = mixture / plans.units[numbers]
        weights = [np.asarray(scaled @ np.stack(parts)) for parts in zip(*usage, strict=True)]
        outcome = _least(problem, weights, deadline)
        proven = max(proven, outcome.bound - float(scaled @ plans.budgets[numbers]))
        plan = plans.take(outcome.assignment)
        if plans.best is not None or proven > FITS or deadline.left() <= 0.0:
            break
        excess = (plan.usage[numbers] - plans.budgets[numbers]) / plans.units[numbers]
        mixture = mixture * np.exp(STEP * excess / max(float(np.abs(excess).max()), FITS))
        mixture /= mixture.sum()
    return proven


def _row_weights(problem: Problem, number: int) -> list[Floats]:
    weights = problem.memory_rows[number].bytes
    return [weights.get(node, np.zeros(len(costs))) for node, costs in enumerate(problem.node_costs)]


def _least(problem: Problem, weights: Sequence[Floats], deadline: Deadline) -> ExactOutcome:
    prohibitive = 1.0 + 2.0 * sum(float(np.ptp(values)) for values in weights)
    costs = [
        values + np.where(is_forbidden(seconds), prohibitive, 0.0)
        for values, seconds in zip(weights, problem.node_costs, strict=True)
    ]
    edges = [
        (edge.source, edge.target, np.where(is_forbidden(edge.costs), prohibitive, 0.0))
        for edge in problem.edges
        if is_forbidden(edge.costs).any()
    ]
    return solve_graph(Graph(Arena(), costs, edges), gap=EXACT, deadline=deadline)
