import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autopar.planner.solver import Problem, check_certificate, exact, solve


def test_known_messages_start_a_changed_problem(
    monkeypatch: pytest.MonkeyPatch, layers: Callable[..., Problem]
) -> None:
    monkeypatch.setattr(exact, "PEAK_ENTRIES", 0)
    problem = layers(3)
    first = pickle.loads(pickle.dumps(solve(problem)))
    assert first.messages
    dearer = problem.node_costs[60].copy()
    dearer[first.assignment[60]] *= 1.5
    changed = replace(problem, node_costs=(*problem.node_costs[:60], dearer, *problem.node_costs[61:]))
    cold = solve(changed)
    warm = solve(changed, warm_start=first.assignment, warm_messages=first.messages)
    check_certificate(changed, warm)
    assert np.isclose(warm.objective, cold.objective, rtol=1e-9)
    assert warm.statistics["sweeps"] < cold.statistics["sweeps"]


def test_foreign_messages_do_no_harm(
    random_problem: Callable[..., Problem], optimum: Callable[[Problem], float]
) -> None:
    for seed in range(40):
        problem, other = random_problem(seed, density=1.2), random_problem(seed + 1, density=1.2)
        solution = solve(problem, warm_messages=solve(other).messages)
        check_certificate(problem, solution)
        assert np.isclose(solution.objective, optimum(problem), rtol=1e-9)
