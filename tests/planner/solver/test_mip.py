from collections.abc import Callable

import numpy as np
import pytest

from autopar.planner.solver import Problem, evaluate, mip, solve


@pytest.mark.parametrize("seed", range(12))
def test_highs_on_the_raw_problem_agrees_with_the_stack(
    seed: int, random_problem: Callable[..., Problem]
) -> None:
    problem = random_problem(seed)
    edges = [(edge.source, edge.target, edge.costs) for edge in problem.edges if edge.source != edge.target]
    costs = [values.copy() for values in problem.node_costs]
    for edge in problem.edges:
        if edge.source == edge.target:
            costs[edge.source] += np.diagonal(edge.costs)
    found = mip.solve_core(costs, edges, time_limit=20.0)
    assert found.labels is not None
    assert np.isclose(evaluate(problem, found.labels)[0], found.objective, rtol=1e-9)
    assert np.isclose(solve(problem).objective, found.objective, rtol=1e-9)


def test_budgets_that_nothing_fits_are_reported_infeasible() -> None:
    costs, weights = [np.array([1.0, 2.0])], [np.array([[5.0, 4.0]])]
    found = mip.solve_core(costs, [], time_limit=5.0, weights=weights, budgets=np.array([3.0]))
    assert found.infeasible
    assert found.labels is None


def test_a_usage_that_is_nothing_but_an_error_of_rounding_is_nothing():
    costs = np.array([0.296, 0.283, 0.305])
    usage = np.array([[0.92, 2.9, 0.2], [0.99, 0.0, 2.5], [0.90, 2.0**-53, 2.3]])
    found = mip.solve_master(costs, usage, penalty=305.0)
    wanted = mip.solve_master(costs, np.where(usage < 1e-9, 0.0, usage), penalty=305.0)
    assert found[0] == wanted[0]
    assert found[1].tolist() == wanted[1].tolist()


def test_the_master_mixes_two_plans_and_prices_the_budget() -> None:
    # Half of the small and half of the big plan use the budget exactly: 1 s saved per budget given.
    value, multipliers = mip.solve_master(np.array([2.0, 1.0]), np.array([[0.5, 1.5]]), penalty=1e3)
    assert np.isclose(value, 1.5)
    assert np.allclose(multipliers, [1.0])
