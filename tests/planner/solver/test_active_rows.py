from collections.abc import Callable

import numpy as np
import pytest

from autopar.planner.solver import MemoryRow, Problem, Status, active_rows, check_certificate, solve
from autopar.planner.solver.active_rows import FEW, first_rows


def test_few_rows_are_all_active_and_of_many_the_first_the_last_and_the_fullest(
    random_problem: Callable[..., Problem],
) -> None:
    assert first_rows(random_problem(1, rows=FEW)).tolist() == list(range(FEW))
    rows = [
        MemoryRow(name=str(number), bytes={0: np.array([float(number == 5), 0.0])}, budget_bytes=1.0)
        for number in range(FEW + 1)
    ]
    problem = Problem(node_costs=(np.array([1.0, 2.0]),), edges=(), memory_rows=tuple(rows))
    assert first_rows(problem).tolist() == [0, 5, FEW]


@pytest.mark.exhaustive(every=6)
@pytest.mark.parametrize("seed", range(60))
def test_rows_that_join_later_give_the_optimum_within_all(
    seed: int,
    random_problem: Callable[..., Problem],
    optimum: Callable[[Problem], float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(active_rows, "FEW", 1)
    problem = random_problem(seed, rows=5, tightness=(0.3, 0.5, 0.8)[seed % 3])
    solution = solve(problem)
    check_certificate(problem, solution)
    best = optimum(problem)
    if np.isinf(best):
        assert solution.status is Status.INFEASIBLE
    else:
        assert solution.status is Status.OPTIMAL
        assert np.isclose(solution.objective, best, rtol=1e-9)
