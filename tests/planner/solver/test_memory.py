from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autopar.planner.solver import (
    FORBIDDEN,
    Edge,
    MemoryRow,
    Problem,
    Status,
    check_certificate,
    evaluate,
    solve,
)


@pytest.mark.parametrize("seed", range(60))
def test_budgeted_optimum_equals_enumeration(
    seed: int, random_problem: Callable[..., Problem], optimum: Callable[[Problem], float]
) -> None:
    problem = random_problem(seed, rows=1 + seed % 3)
    best = optimum(problem)
    solution = solve(problem)
    check_certificate(problem, solution)
    if np.isinf(best):
        assert solution.status is Status.INFEASIBLE
    else:
        assert solution.status is Status.OPTIMAL
        assert np.isclose(solution.objective, best, rtol=1e-9)
        assert solution.lower_bound <= best * (1 + 1e-9)
        assert solution.certificate.proven_bound <= best * (1 + 1e-9)


def test_a_slack_budget_changes_nothing(random_problem: Callable[..., Problem]) -> None:
    problem = random_problem(4, rows=1)
    loose = replace(problem, memory_rows=(replace(problem.memory_rows[0], budget_bytes=1e12),))
    assert solve(loose).objective == solve(replace(problem, memory_rows=())).objective


def test_the_smallest_plan_is_reported_when_nothing_fits(random_problem: Callable[..., Problem]) -> None:
    problem = random_problem(8, rows=1)
    row = replace(problem.memory_rows[0], budget_bytes=0.5e9)
    problem = replace(problem, memory_rows=(row,))
    solution = solve(problem)
    least = row.constant_bytes + sum(float(values.min()) for values in row.bytes.values())
    assert solution.status is Status.INFEASIBLE
    assert solution.statistics["minimum_bytes"] == least
    assert solution.statistics["memory_row"] == row.name
    assert evaluate(problem, solution.assignment)[1] == (least,)


def test_the_smallest_plan_avoids_forbidden_pairs() -> None:
    row = MemoryRow(name="m", bytes={0: np.array([1.0, 5.0]), 1: np.array([1.0, 7.0])}, budget_bytes=2.0)
    edge = Edge(source=0, target=1, costs=np.array([[FORBIDDEN, 0.0], [0.0, 0.0]]))
    problem = Problem(node_costs=(np.zeros(2), np.zeros(2)), edges=(edge,), memory_rows=(row,))
    solution = solve(problem)
    assert (solution.status, solution.statistics["minimum_bytes"]) == (Status.INFEASIBLE, 6.0)


def test_less_memory_never_costs_less(layers: Callable[..., Problem]) -> None:
    free = layers(4, labels=6, nodes_per_layer=20)
    rng = np.random.default_rng(0)
    weights = {node: rng.integers(1, 9, costs.size) * 1e8 for node, costs in enumerate(free.node_costs)}
    row = MemoryRow(name="m", bytes=weights, budget_bytes=np.inf)
    base = solve(free)
    used = evaluate(replace(free, memory_rows=(row,)), base.assignment)[1][0]
    least = sum(float(values.min()) for values in weights.values())
    objectives = [base.objective]
    for part in (0.6, 0.2):
        budget = least + part * (used - least)
        problem = replace(free, memory_rows=(replace(row, budget_bytes=budget),))
        solution = solve(problem, gap=1e-3)
        check_certificate(problem, solution)
        assert solution.gap <= 1e-3
        objectives.append(solution.objective)
    assert objectives[0] <= objectives[1] <= objectives[2] * (1 + 1e-3)
