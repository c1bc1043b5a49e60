from collections.abc import Callable

import numpy as np
import pytest

from autopar.planner.solver import Problem, Status, check_certificate, exact, solve

OPTIMUM = Callable[[Problem], float]


def test_the_dual_route_alone_is_exact(
    monkeypatch: pytest.MonkeyPatch, random_problem: Callable[..., Problem], optimum: OPTIMUM
) -> None:
    monkeypatch.setattr(exact, "PEAK_ENTRIES", 0)
    monkeypatch.setattr(exact, "RECOMBINE_PEAK_ENTRIES", 50)
    kinds = set()
    for seed in range(60):
        problem = random_problem(seed, density=0.9)
        solution = solve(problem)
        check_certificate(problem, solution)
        assert np.isclose(solution.objective, optimum(problem), rtol=1e-9)
        kinds.add(solution.certificate.kind)
    assert kinds >= {"messages", "elimination"}


def test_branch_and_bound_is_exact_and_says_so(
    monkeypatch: pytest.MonkeyPatch, random_problem: Callable[..., Problem], optimum: OPTIMUM
) -> None:
    monkeypatch.setattr(exact, "PEAK_ENTRIES", 0)
    monkeypatch.setattr(exact, "RECOMBINE_PEAK_ENTRIES", 0)
    monkeypatch.setattr(exact, "MAX_ROUNDS", 1)
    branched = 0
    for seed in range(60):
        problem = random_problem(seed, density=1.2)
        solution = solve(problem)
        check_certificate(problem, solution)
        assert solution.status is Status.OPTIMAL
        assert np.isclose(solution.objective, optimum(problem), rtol=1e-9)
        branched += solution.certificate.kind == "solver"
        assert solution.certificate.proven_bound <= solution.objective
    assert branched > 0


def test_bigger_problems_sweep_by_class_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch, layers: Callable[..., Problem]
) -> None:
    problem = layers(6, labels=8, nodes_per_layer=24)
    by_schedule = solve(problem)
    monkeypatch.setattr(exact, "SCHEDULE_ORDER_NODES", 0)
    assert np.isclose(solve(problem).objective, by_schedule.objective, rtol=1e-9)


def test_what_is_too_large_to_branch_ends_with_its_bound(
    monkeypatch: pytest.MonkeyPatch, random_problem: Callable[..., Problem], optimum: OPTIMUM
) -> None:
    branches: list[int] = []
    gave_up = 0
    branch = exact._Search._branch

    def counted(search: exact._Search) -> None:
        branches.append(1)
        assert len(branches) < 100, "the search goes on after it gave up"
        branch(search)

    monkeypatch.setattr(exact._Search, "_branch", counted)
    for name in ("PEAK_ENTRIES", "RECOMBINE_PEAK_ENTRIES", "MAX_BRANCH_LABELS"):
        monkeypatch.setattr(exact, name, 0)
    monkeypatch.setattr(exact, "MAX_ROUNDS", 1)
    for seed in range(10):
        branches.clear()
        problem = random_problem(seed, density=1.2)
        solution = solve(problem)
        check_certificate(problem, solution)
        assert solution.lower_bound <= optimum(problem) * (1 + 1e-9) <= solution.objective * (1 + 2e-9)
        gave_up += bool(branches)
    assert gave_up
