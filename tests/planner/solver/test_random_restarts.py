"""Coordinate descent with random restarts never finds a better assignment than one called optimal."""

from collections.abc import Callable

import numpy as np

from autopar.planner.solver import Problem, Status, evaluate, solve


def descend(problem: Problem, labels: np.ndarray) -> float:
    """Objective after single moves until none helps."""
    around: list[list[tuple[np.ndarray, int]]] = [[] for _ in labels]
    for edge in problem.edges:
        around[edge.source].append((edge.costs, edge.target))
        around[edge.target].append((edge.costs.T, edge.source))
    moved = True
    while moved:
        moved = False
        for node, costs in enumerate(problem.node_costs):
            totals = costs + sum(matrix[:, labels[other]] for matrix, other in around[node])
            best = int(totals.argmin())
            if totals[best] < totals[labels[node]] - 1e-15:
                labels[node], moved = best, True
    return evaluate(problem, labels)[0]


def test_local_search_never_beats_an_optimum(layers: Callable[..., Problem]) -> None:
    rng = np.random.default_rng(0)
    for seed in range(4):
        problem = layers(3, labels=6, nodes_per_layer=16, seed=seed)
        solution = solve(problem)
        assert solution.status is Status.OPTIMAL
        sizes = [costs.size for costs in problem.node_costs]
        found = [descend(problem, rng.integers(0, sizes)) for _ in range(15)]
        assert min(found) >= solution.objective * (1 - 1e-12)
        assert descend(problem, solution.assignment.copy()) >= solution.objective * (1 - 1e-12)
