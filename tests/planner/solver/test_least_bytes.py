from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from autopar.planner.solver import Problem
from autopar.planner.solver.assignments import Plans
from autopar.planner.solver.deadline import Deadline
from autopar.planner.solver.least_bytes import seek_joint_fit


@pytest.mark.parametrize("seed", range(30))
def test_the_joint_excess_is_a_bound_and_a_fit_ends_the_search(
    seed: int, random_problem: Callable[..., Problem]
) -> None:
    problem = random_problem(seed, rows=3, tightness=0.4)
    plans = Plans(problem)
    proven = seek_joint_fit(problem, plans, range(3), Deadline.after(None))
    sizes = [range(costs.size) for costs in problem.node_costs]
    judge = Plans(problem)
    least = (
        min(
            float(((judge.take(np.array(labels)).usage - judge.budgets) / judge.units).max())
            for labels in product(*sizes)
        )
        if np.prod([len(size) for size in sizes]) < 3000
        else np.inf
    )
    assert proven <= least + 1e-9
    assert plans.best is None or proven <= 1e-9


def test_where_no_row_is_short_nothing_is_sought(random_problem: Callable[..., Problem]) -> None:
    problem = random_problem(0, rows=1, tightness=0.4)
    plans = Plans(problem)
    known = len(plans.known)
    assert seek_joint_fit(problem, plans, (), Deadline.after(None)) == -np.inf
    assert len(plans.known) == known
