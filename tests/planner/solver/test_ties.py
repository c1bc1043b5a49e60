from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autopar.planner.solver import (
    FORBIDDEN,
    CertificateError,
    Edge,
    Problem,
    Tie,
    check_certificate,
    evaluate,
    solve,
)
from autopar.planner.solver.ties import merge_ties


def tied(problem: Problem, seed: int) -> Problem:
    """Two or three ties, among them chains."""
    rng = np.random.default_rng(seed)
    sizes = [costs.size for costs in problem.node_costs]
    order = rng.permutation(len(sizes)).tolist()
    ties = []
    for place in range(1, int(rng.integers(3, 5))):
        source, target = order[int(rng.integers(0, place))], order[place]
        ties.append(Tie(source=source, target=target, labels=rng.integers(0, sizes[target], sizes[source])))
    return replace(problem, ties=tuple(ties))


def as_edges(problem: Problem) -> Problem:
    """The same problem with ties written as forbidden pairs: no code of `ties.py` takes part."""
    edges = list(problem.edges)
    for tie in problem.ties:
        costs = np.full((problem.node_costs[tie.source].size, problem.node_costs[tie.target].size), FORBIDDEN)
        costs[np.arange(len(costs)), tie.labels] = 0.0
        edges.append(Edge(source=tie.source, target=tie.target, costs=costs))
    return replace(problem, edges=tuple(edges), ties=())


@pytest.mark.exhaustive(sample="0")
@pytest.mark.parametrize("rows", [0, 1])
def test_the_optimum_is_that_of_brute_force(
    rows: int, random_problem: Callable[..., Problem], optimum: Callable[[Problem], float]
) -> None:
    for seed in range(100):
        problem = tied(random_problem(seed, rows=rows, tightness=1.0), seed)
        best = optimum(as_edges(problem))
        solution = solve(problem)
        if best < FORBIDDEN:
            assert np.isclose(solution.objective, best, rtol=1e-9)
        for tie in problem.ties:
            assert solution.assignment[tie.target] == tie.labels[solution.assignment[tie.source]]
        check_certificate(problem, solution)


def test_merging_keeps_arrays_shared() -> None:
    moves = np.arange(9.0).reshape(3, 3) * 1e-3
    labels = np.array([2, 0, 1])
    problem = Problem(
        node_costs=tuple(np.arange(3.0) * 1e-3 for _ in range(6)),
        edges=(Edge(source=1, target=2, costs=moves), Edge(source=4, target=5, costs=moves)),
        ties=(Tie(source=0, target=1, labels=labels), Tie(source=3, target=4, labels=labels)),
    )
    merged = merge_ties(problem)
    assert merged.edges[0].costs is merged.edges[1].costs
    assert [edge.source for edge in merged.edges] == [0, 3]


def test_a_broken_tie_and_a_false_map_are_rejected(random_problem: Callable[..., Problem]) -> None:
    problem = tied(random_problem(3), 3)
    solution = solve(problem)
    tie = problem.ties[0]
    others = np.arange(len(problem.node_costs[tie.target]))
    broken = solution.assignment.copy()
    broken[tie.target] = others[others != broken[tie.target]][0]
    objective = evaluate(problem, broken)[0]
    with pytest.raises(CertificateError, match="breaks the tie"):
        check_certificate(problem, replace(solution, assignment=broken, objective=objective))
    false = replace(tie, labels=(tie.labels + 1) % len(others))
    with pytest.raises(CertificateError):
        check_certificate(replace(problem, ties=(false, *problem.ties[1:])), solution)


def test_impossible_ties_are_refused(random_problem: Callable[..., Problem]) -> None:
    problem = random_problem(0)
    sizes = [costs.size for costs in problem.node_costs]
    there = Tie(source=0, target=1, labels=np.zeros(sizes[0], dtype=np.int64))
    back = Tie(source=1, target=0, labels=np.zeros(sizes[1], dtype=np.int64))
    with pytest.raises(ValueError, match="along a chain"):
        replace(problem, ties=(there, back))
    with pytest.raises(ValueError, match="tied twice"):
        replace(problem, ties=(there, there))
    with pytest.raises(ValueError, match="must give each"):
        replace(problem, ties=(replace(there, labels=there.labels[:-1]),))
    with pytest.raises(ValueError, match="outside"):
        replace(problem, ties=(replace(there, target=99),))
