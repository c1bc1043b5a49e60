import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autopar.planner.solver import (
    FORBIDDEN,
    Edge,
    MemoryRow,
    Problem,
    Status,
    check_certificate,
    evaluate,
    first_fit,
    mip,
    solve,
    solving,
)
from autopar.planner.solver.budget_search import BudgetedOutcome
from autopar.planner.solver.exact import Proof


@pytest.mark.exhaustive(every=10)
@pytest.mark.parametrize("seed", range(300))
def test_budgeted_optimum_equals_enumeration(
    seed: int, random_problem: Callable[..., Problem], optimum: Callable[[Problem], float]
) -> None:
    problem = random_problem(seed, rows=1 + seed % 5, tightness=(0.3, 0.5, 0.8)[seed % 3])
    best = optimum(problem)
    solution = solve(problem)
    check_certificate(problem, solution)
    if np.isinf(best):
        assert solution.status is Status.INFEASIBLE
    else:
        assert solution.status is Status.OPTIMAL
        assert np.isclose(solution.objective, best, rtol=1e-9)
        assert solution.lower_bound <= best * (1 + 1e-9)
        assert solution.certificate.proven_bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_highs_on_the_raw_rows_agrees(seed: int, random_problem: Callable[..., Problem]) -> None:
    problem = random_problem(1000 + seed, rows=2 + seed % 4)
    edges = [(edge.source, edge.target, edge.costs) for edge in problem.edges if edge.source != edge.target]
    costs = [values.copy() for values in problem.node_costs]
    for edge in problem.edges:
        if edge.source == edge.target:
            costs[edge.source] += np.diagonal(edge.costs)
    rows = problem.memory_rows
    weights = [np.stack([row.bytes.get(node, np.zeros(len(c))) for row in rows]) for node, c in enumerate(costs)]
    budgets = np.array([row.budget_bytes - row.constant_bytes for row in rows])
    found = mip.solve_core(costs, edges, time_limit=20.0, weights=weights, budgets=budgets)
    solution = solve(problem)
    assert (solution.status is Status.INFEASIBLE) == found.infeasible
    assert found.infeasible or np.isclose(solution.objective, found.objective, rtol=1e-9)


def test_rows_that_no_plan_exceeds_keep_multiplier_zero(layers: Callable[..., Problem]) -> None:
    problem = limited(layers(3, labels=5, nodes_per_layer=20), part=0.3)
    (tight,) = problem.memory_rows
    slack = tuple(replace(tight, name=f"slack {n}", budget_bytes=2.0 * tight.budget_bytes + n) for n in range(40))
    both = solve(replace(problem, memory_rows=(*slack[:20], tight, *slack[20:])), gap=1e-3)
    assert both.status is Status.OPTIMAL
    assert np.flatnonzero(both.certificate.multipliers).tolist() == [20]
    assert both.lower_bound <= solve(problem, gap=1e-3).objective * (1 + 1e-9)


def test_rows_that_each_fit_but_not_together_are_proven_infeasible() -> None:
    rows = tuple(
        MemoryRow(name=name, bytes={0: np.array(used)}, budget_bytes=4.0)
        for name, used in (("first", [0.0, 10.0]), ("second", [10.0, 0.0]))
    )
    solution = solve(Problem(node_costs=(np.array([1.0, 2.0]),), edges=(), memory_rows=rows))
    assert solution.status is Status.INFEASIBLE
    assert solution.statistics["joint_excess"] == pytest.approx(0.25)
    assert "minimum_bytes" not in solution.statistics


def test_no_plan_in_the_time_is_not_called_infeasible(layers: Callable[..., Problem]) -> None:
    problem = limited(layers(3, labels=5, nodes_per_layer=20), part=0.01)
    solution = solve(problem, time_limit=0.0)
    assert solution.status is Status.TIME_LIMIT
    assert "no_plan" in solution.statistics
    assert solution.lower_bound <= solve(problem, gap=1e-3).objective
    check_certificate(problem, solution)


def test_the_smallest_plan_avoids_forbidden_pairs_below_the_ceiling() -> None:
    # Costs of a millisecond put the first ceiling far under FORBIDDEN: the least bytes must still see it.
    weights = np.array([1.0, 5.0])
    row = MemoryRow(name="m", bytes={0: weights, 1: weights}, budget_bytes=6.0)
    edge = Edge(source=0, target=1, costs=np.array([[FORBIDDEN, 0.0], [0.0, 0.0]]))
    costs = np.array([2e-3, 1e-3])
    problem = Problem(node_costs=(costs, costs), edges=(edge,), memory_rows=(row,))
    solution = solve(problem)
    assert (solution.status, solution.objective) == (Status.OPTIMAL, 3e-3)
    tighter = solve(replace(problem, memory_rows=(replace(row, budget_bytes=5.0),)))
    assert (tighter.status, tighter.statistics["minimum_bytes"]) == (Status.INFEASIBLE, 6.0)


def test_the_multipliers_of_another_limit_start_the_ascent(layers: Callable[..., Problem]) -> None:
    free = layers(4, labels=6, nodes_per_layer=20)
    before = solve(limited(free, part=0.3), gap=1e-3)
    problem = limited(free, part=0.32)
    cold = solve(problem, gap=1e-3)
    warm = solve(
        problem,
        gap=1e-3,
        warm_start=before.assignment,
        warm_multipliers=before.certificate.multipliers,
    )
    check_certificate(problem, warm)
    assert warm.status is cold.status is Status.OPTIMAL
    assert warm.statistics["prices"] <= cold.statistics["prices"]
    with pytest.raises(ValueError, match="multipliers"):
        solve(problem, warm_multipliers=(1.0, 2.0))


def test_the_price_of_a_looser_limit_is_raised_a_little_until_something_fits(
    layers: Callable[..., Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = layers(24, labels=6, nodes_per_layer=12)
    before = solve(limited(free, part=0.3), gap=1e-3)
    problem, prices = limited(free, part=0.29), []
    for least in (first_fit.LEAST_RISE, first_fit.PRICE_RISE):
        monkeypatch.setattr(first_fit, "LEAST_RISE", least)
        found = solve(problem, gap=1e-3, warm_multipliers=before.certificate.multipliers)
        check_certificate(problem, found)
        assert found.status is Status.OPTIMAL
        prices.append(found.statistics["prices"])
    assert prices[0] < prices[1]


@pytest.mark.parametrize("has_start", [False, True])
def test_a_bound_above_what_counts_ends_the_solve(layers: Callable[..., Problem], has_start: bool) -> None:
    problem = limited(layers(4, labels=6, nodes_per_layer=20), part=0.3)
    whole = solve(problem, gap=1e-3)
    free = solve(replace(problem, memory_rows=()))
    start = whole.assignment if has_start else None
    below = 0.5 * (free.objective + whole.lower_bound)
    stopped = solve(problem, gap=1e-3, stop_above=below, warm_start=start)
    assert below < stopped.lower_bound <= whole.objective
    assert stopped.statistics["prices"] < whole.statistics["prices"]
    above = solve(problem, gap=1e-3, stop_above=whole.objective)
    assert np.array_equal(above.assignment, whole.assignment)


def test_what_does_not_fit_bounds_nothing(layers: Callable[..., Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    """A solve that ends early may have met nothing that fits, and that costs less than the optimum within the rows."""
    problem = limited(layers(4, labels=6, nodes_per_layer=20), part=0.3)
    whole, free = solve(problem, gap=1e-3), solve(replace(problem, memory_rows=()))
    assert free.objective < whole.lower_bound

    def ended(*_: object, **__: object) -> BudgetedOutcome:
        proof = Proof(bound=whole.lower_bound, steps=(), messages=np.zeros(0), eliminated=False)
        return BudgetedOutcome(
            assignment=free.assignment, bound=whole.lower_bound, proof=proof, multipliers=whole.certificate.multipliers
        )

    monkeypatch.setattr(solving, "solve_within_budgets", ended)
    assert solve(problem, stop_above=free.objective).lower_bound == whole.lower_bound


def test_a_slack_budget_changes_nothing(random_problem: Callable[..., Problem]) -> None:
    problem = random_problem(4, rows=1)
    loose = replace(problem, memory_rows=(replace(problem.memory_rows[0], budget_bytes=1e12),))
    assert solve(loose).objective == solve(replace(problem, memory_rows=())).objective


def test_the_smallest_plan_is_reported_when_nothing_fits(random_problem: Callable[..., Problem]) -> None:
    problem = random_problem(8, rows=1)
    row = replace(problem.memory_rows[0], budget_bytes=0.5e9)
    problem = replace(problem, memory_rows=(row,))
    solution = solve(problem)
    least = row.constant_bytes + sum(float(values.min()) for values in row.bytes.values())
    assert solution.status is Status.INFEASIBLE
    assert solution.statistics["minimum_bytes"] == least
    assert solution.statistics["memory_row"] == row.name
    assert evaluate(problem, solution.assignment)[1] == (least,)


def test_the_smallest_plan_avoids_forbidden_pairs() -> None:
    row = MemoryRow(name="m", bytes={0: np.array([1.0, 5.0]), 1: np.array([1.0, 7.0])}, budget_bytes=2.0)
    edge = Edge(source=0, target=1, costs=np.array([[FORBIDDEN, 0.0], [0.0, 0.0]]))
    problem = Problem(node_costs=(np.zeros(2), np.zeros(2)), edges=(edge,), memory_rows=(row,))
    solution = solve(problem)
    assert (solution.status, solution.statistics["minimum_bytes"]) == (Status.INFEASIBLE, 6.0)


def limited(free: Problem, part: float) -> Problem:
    """`free` with random bytes and one row: `part` of the way from the least bytes to those of the optimum."""
    rng = np.random.default_rng(0)
    weights = {node: rng.integers(1, 9, costs.size) * 1e8 for node, costs in enumerate(free.node_costs)}
    row = MemoryRow(name="m", bytes=weights, budget_bytes=np.inf)
    used = evaluate(replace(free, memory_rows=(row,)), solve(free).assignment)[1][0]
    least = sum(float(values.min()) for values in weights.values())
    return replace(free, memory_rows=(replace(row, budget_bytes=least + part * (used - least)),))


def test_a_sweep_of_limits_is_monotone_and_consistent(layers: Callable[..., Problem]) -> None:
    free = layers(4, labels=6, nodes_per_layer=20)
    found = []
    for part in (0.9, 0.6, 0.3, 0.1, 0.02, 0.0):
        problem = limited(free, part)
        solution = solve(problem, gap=1e-3)
        check_certificate(problem, solution)
        assert solution.gap <= 1e-3
        assert evaluate(problem, solution.assignment)[1][0] <= problem.memory_rows[0].budget_bytes
        found.append(solution)
    for looser, tighter in itertools.pairwise(found):
        assert looser.objective <= tighter.objective * (1 + 1e-3)
    for number, solution in enumerate(found):
        # A plan within a tighter limit is within this one: no bound may exceed it.
        assert all(solution.lower_bound <= other.objective * (1 + 1e-9) for other in found[number:])


def test_a_deep_problem_with_many_rows_gets_a_plan_and_a_small_gap(layers: Callable[..., Problem]) -> None:
    """Rows like moments of a step: row k counts layers up to k fully and the later ones half."""
    depth, per_layer = 24, 40
    plain = layers(depth, labels=6, nodes_per_layer=per_layer)
    weights = np.linspace(10.0, 1.0, 6)
    half = per_layer // 2

    def layer(node: int) -> int:
        return (node if node < depth * half else depth * per_layer - 1 - node) // half

    def row(number: int, budget: float) -> MemoryRow:
        nodes = range(len(plain.node_costs))
        bytes_ = {node: weights * (1.0 if layer(node) <= number else 0.5) for node in nodes}
        return MemoryRow(name=str(number), bytes=bytes_, budget_bytes=budget)

    problem = replace(plain, memory_rows=tuple(row(number, 0.4 * 10.0 * depth * per_layer) for number in range(depth)))
    solution = solve(problem, gap=1e-3)
    check_certificate(problem, solution)
    _, used = evaluate(problem, solution.assignment)
    assert max(used) <= problem.memory_rows[0].budget_bytes
    assert solution.status is Status.OPTIMAL
    assert solution.lower_bound > 1.01 * solve(plain, gap=1e-4).lower_bound
