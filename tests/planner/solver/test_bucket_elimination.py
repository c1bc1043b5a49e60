from collections.abc import Callable

import numpy as np
import pytest

from autopar.planner.solver import Problem, evaluate
from autopar.planner.solver.arena import Arena
from autopar.planner.solver.bucket_elimination import eliminate_all, elimination_order
from autopar.planner.solver.reductions import Graph, back_substitute


def graph_of(problem: Problem) -> Graph:
    return Graph(
        Arena(), problem.node_costs, [(edge.source, edge.target, edge.costs) for edge in problem.edges]
    )


@pytest.mark.parametrize("seed", range(40))
def test_elimination_of_unreduced_problems_finds_the_optimum(
    seed: int, random_problem: Callable[..., Problem], optimum: Callable[[Problem], float]
) -> None:
    problem = random_problem(seed, density=0.9)
    graph = graph_of(problem)
    order = elimination_order(graph, 10**6, 10**7)
    assert order is not None
    eliminate_all(graph, order)
    assert np.isclose(graph.constant, optimum(problem), rtol=1e-12)
    assert np.isclose(evaluate(problem, back_substitute(graph, {}))[0], graph.constant, rtol=1e-12)


def test_an_order_above_the_limit_is_refused(random_problem: Callable[..., Problem]) -> None:
    graph = graph_of(random_problem(3, density=2.0))
    order = elimination_order(graph, 10**6, 10**7)
    assert order is not None
    assert elimination_order(graph, order.peak_entries, order.total_entries) == order
    assert elimination_order(graph, order.peak_entries - 1, 10**7) is None
    assert elimination_order(graph, 10**6, order.total_entries - 1) is None
