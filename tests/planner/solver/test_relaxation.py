from collections.abc import Callable

import numpy as np
import pytest

from autopar.planner.solver import Problem
from autopar.planner.solver.arena import Arena
from autopar.planner.solver.deadline import Deadline
from autopar.planner.solver.reductions import Graph, simplify
from autopar.planner.solver.relaxation import Relaxation


def weighted_graph(problem: Problem) -> Graph:
    rows = problem.memory_rows
    weights = [
        np.stack([row.bytes.get(node, np.zeros(costs.size)) for row in rows])
        for node, costs in enumerate(problem.node_costs)
    ]
    edges = [(edge.source, edge.target, edge.costs) for edge in problem.edges]
    graph = Graph(Arena(), problem.node_costs, edges, weights)
    simplify(graph)
    return graph


@pytest.mark.parametrize("seed", range(30))
def test_every_look_bounds_the_optimum(
    seed: int, random_problem: Callable[..., Problem], optimum: Callable[[Problem], float]
) -> None:
    problem = random_problem(seed, rows=2, tightness=0.8)
    graph = weighted_graph(problem)
    if not graph.nodes():
        pytest.skip("reduced to nothing")
    budgets = np.array([row.budget_bytes - row.constant_bytes for row in problem.memory_rows])
    relaxation, best = Relaxation(graph, budgets), optimum(problem)
    rng = np.random.default_rng(seed)
    for scale in (0.0, 1e-14, 1e-13, 1e-12, 1e-14):
        look = relaxation.look(scale * rng.random(2), 4, Deadline.after(None))
        assert look.bound <= best * (1 + 1e-9)
        for labels in look.assignments:
            positions = relaxation.positions(labels)
            assert positions is not None
            assert (relaxation.original(positions) == labels).all()
