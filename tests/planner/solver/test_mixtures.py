import itertools
from collections.abc import Callable

import numpy as np
import pytest

from autopar.planner.solver import Problem, evaluate
from autopar.planner.solver.assignments import Plans
from autopar.planner.solver.mixtures import Mixtures
from tests.planner.solver.test_budgets import limited
from tests.planner.solver.test_relaxation import weighted_graph


@pytest.mark.parametrize("seed", range(20))
def test_a_mixture_is_the_best_of_all_combinations(seed: int, random_problem: Callable[..., Problem]) -> None:
    problem = random_problem(seed, rows=1)
    graph, rng = weighted_graph(problem), np.random.default_rng(seed)
    pool = [np.array([rng.choice(graph.domains[node]) for node in range(len(graph.domains))]) for _ in range(2)]
    price = 1e-13

    def total(labels: np.ndarray) -> float:
        cost, used = evaluate(problem, labels)
        return cost + price * used[0]

    found = Mixtures(graph, pool).at(np.array([price]))
    assert found is not None
    choices = [sorted({int(labels[node]) for labels in pool}) for node in range(len(graph.domains))]
    best = min(total(np.array(labels)) for labels in itertools.product(*choices))
    # Nodes that were eliminated before are free to do better than the pool.
    assert total(found) <= best * (1 + 1e-9)


def test_bisection_meets_plans_that_fit(layers: Callable[..., Problem]) -> None:
    problem = limited(layers(3, labels=5, nodes_per_layer=20), part=0.4)
    row = problem.memory_rows[0]
    small = np.array([int(row.bytes[node].argmin()) for node in range(len(problem.node_costs))])
    fast = np.array([int(costs.argmin()) for costs in problem.node_costs])
    plans = Plans(problem)
    cost = plans.take(small).cost
    Mixtures(weighted_graph(problem), [small, fast]).fitting(plans, np.array([1e-13]))
    assert plans.objective() < cost
