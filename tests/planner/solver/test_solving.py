import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.planner.solver import FORBIDDEN, Edge, Problem, Status, check_certificate, evaluate, solve
from autopar.planner.solver.solving import ceilings

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("seed", range(150))
def test_optimum_equals_enumeration(
    seed: int, random_problem: Callable[..., Problem], optimum: Callable[[Problem], float]
) -> None:
    problem = random_problem(seed, density=0.3 + 0.2 * (seed % 4), digits=seed % 7)
    solution = solve(problem)
    check_certificate(problem, solution)
    assert solution.status is Status.OPTIMAL
    assert np.isclose(solution.objective, optimum(problem), rtol=1e-9)
    assert solution.certificate.kind != "solver"


def test_bound_is_below_objective_is_below_any_assignment(layers: Callable[..., Problem]) -> None:
    problem = layers(3, labels=7)
    solution = solve(problem)
    rng = np.random.default_rng(0)
    assert solution.lower_bound <= solution.objective
    for _ in range(20):
        labels = rng.integers(0, 7, len(problem.node_costs))
        assert solution.objective <= evaluate(problem, labels)[0]


@pytest.mark.parametrize("seed", range(10))
def test_another_label_never_raises_the_optimum(seed: int, random_problem: Callable[..., Problem]) -> None:
    problem, rng = random_problem(seed), np.random.default_rng(seed)
    grown = replace(
        problem,
        node_costs=(np.append(problem.node_costs[0], rng.random() * 1e-3), *problem.node_costs[1:]),
        edges=tuple(_with_label_of_node_zero(edge, rng) for edge in problem.edges),
    )
    assert solve(grown).objective <= solve(problem).objective * (1 + 1e-9)


def _with_label_of_node_zero(edge: Edge, rng: np.random.Generator) -> Edge:
    costs = edge.costs
    if edge.source == 0:
        costs = np.vstack([costs, rng.random((1, costs.shape[1])) * 1e-3])
    if edge.target == 0:
        costs = np.hstack([costs, rng.random((costs.shape[0], 1)) * 1e-3])
    return replace(edge, costs=costs)


def test_thirty_two_layers_are_proven_optimal(layers: Callable[..., Problem]) -> None:
    problem = layers(32)
    solution = solve(problem)
    started = time.process_time()
    check_certificate(problem, solution)
    print(
        f"{len(problem.node_costs)} nodes, {len(problem.edges)} edges: "
        f"{solution.statistics['cpu_seconds']:.2f} CPU s, check {time.process_time() - started:.2f} CPU s"
    )
    assert solution.status is Status.OPTIMAL
    assert solution.certificate.kind != "solver"


def test_forbidden_choices_are_avoided_without_losing_precision(
    random_problem: Callable[..., Problem], optimum: Callable[[Problem], float]
) -> None:
    for seed in range(20):
        problem, rng = random_problem(seed, digits=9), np.random.default_rng(seed)
        edges = tuple(
            replace(edge, costs=np.where(rng.random(edge.costs.shape) < 0.4, FORBIDDEN, edge.costs))
            for edge in problem.edges
        )
        problem = replace(problem, edges=edges)
        best, solution = optimum(problem), solve(problem)
        check_certificate(problem, solution)
        assert np.isclose(solution.objective, best, rtol=1e-9)
        assert (solution.status is Status.INFEASIBLE) == (best >= 0.5 * FORBIDDEN)


def test_ceilings_rise_until_nothing_is_cut() -> None:
    problem = Problem(node_costs=(np.array([1.0, 1.0, FORBIDDEN]),), edges=())
    assert list(ceilings(problem)) == [2.0, 2e3, 2e6, np.inf][:2] + [2e5, np.inf][1:]


def test_an_expensive_but_allowed_choice_is_priced_in_full() -> None:
    cheap = np.array([1e-6, 2e-6])
    problem = Problem(node_costs=(*(cheap,) * 20, np.array([50.0])), edges=())
    assert np.isclose(solve(problem).objective, 50.0 + 20e-6, rtol=1e-12)


def test_a_problem_without_edges_or_costs_is_solved() -> None:
    solution = solve(Problem(node_costs=(np.zeros(3), np.zeros(1)), edges=()))
    assert (solution.status, solution.objective, solution.gap) == (Status.OPTIMAL, 0.0, 0.0)


def test_a_time_limit_still_gives_an_assignment_and_a_bound(layers: Callable[..., Problem]) -> None:
    problem = layers(8)
    solution = solve(problem, time_limit=0.0)
    check_certificate(problem, solution)
    assert solution.lower_bound <= solution.objective
    assert solution.status in (Status.TIME_LIMIT, Status.OPTIMAL)


def test_a_warm_start_is_never_made_worse_and_must_fit(layers: Callable[..., Problem]) -> None:
    problem = layers(4)
    best = solve(problem)
    again = solve(problem, warm_start=best.assignment, time_limit=0.0)
    assert again.objective <= best.objective * (1 + 1e-12)
    with pytest.raises(ValueError, match="warm_start"):
        solve(problem, warm_start=best.assignment[:-1])


@pytest.mark.slow
def test_two_runs_and_two_processes_agree(layers: Callable[..., Problem]) -> None:
    problem = layers(6, labels=9)
    first, second = solve(problem), solve(problem)
    assert np.array_equal(first.assignment, second.assignment)
    assert first.certificate.to_dict() == second.certificate.to_dict()
    program = (
        "import json; from conftest import build_layers, build_random_problem\n"
        "from autopar.planner.solver import solve\n"
        "print(json.dumps([solve(p).assignment.tolist() for p in"
        " (build_layers(6, labels=9), build_random_problem(3, rows=2))]))"
    )
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert json.loads(outputs.pop())[0] == first.assignment.tolist()
