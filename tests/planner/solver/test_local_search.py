from collections.abc import Callable

import numpy as np
import pytest

from autopar.planner.solver import MemoryRow, Problem, evaluate
from autopar.planner.solver.local_search import LocalSearch
from autopar.planner.solver.relaxation import Relaxation
from tests.planner.solver.test_relaxation import weighted_graph


@pytest.mark.parametrize("seed", range(30))
def test_a_repaired_plan_fits_and_no_single_move_improves_it(seed: int, random_problem: Callable[..., Problem]) -> None:
    problem = random_problem(seed, rows=2, tightness=0.9)
    graph = weighted_graph(problem)
    assert graph.nodes(), "presolving leaves something to look at"
    limits = np.array([row.budget_bytes for row in problem.memory_rows])
    constants = np.array([row.constant_bytes for row in problem.memory_rows])
    relaxation = Relaxation(graph, limits - constants)
    start = relaxation.original(np.zeros(len(relaxation.nodes), dtype=np.int64))
    repaired = LocalSearch(relaxation, np.arange(len(relaxation.budgets))).repaired(start)
    if repaired is None:
        pytest.skip("no repair found")
    cost, used = evaluate(problem, repaired)
    assert (np.array(used) <= limits * (1 + 1e-9)).all()
    for node in relaxation.nodes:
        for label in graph.domains[node]:
            moved = repaired.copy()
            moved[node] = label
            other, usage = evaluate(problem, moved)
            assert other >= cost * (1 - 1e-9) or (np.array(usage) > limits).any()


def test_the_cheapest_byte_goes_first() -> None:
    row = MemoryRow(
        name="m",
        bytes={0: np.array([10.0, 0.0]), 1: np.array([10.0, 0.0]), 2: np.array([1.0, 2.0])},
        budget_bytes=12.0,
    )
    costs = (np.array([1.0, 5.0]), np.array([1.0, 2.0]), np.array([1.0, 0.5]))
    problem = Problem(node_costs=costs, edges=(), memory_rows=(row,))
    relaxation = Relaxation(weighted_graph(problem), np.array([12.0]))
    assert LocalSearch(relaxation, np.arange(len(relaxation.budgets))).repaired(np.array([0, 0, 0])).tolist() == [
        0,
        1,
        1,
    ]  # type: ignore[union-attr]
