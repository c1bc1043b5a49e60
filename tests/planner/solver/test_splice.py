from collections.abc import Callable

import numpy as np

from autopar.planner.solver import Problem, evaluate
from autopar.planner.solver.arena import Arena
from autopar.planner.solver.reductions import Graph
from autopar.planner.solver.splice import levels, splice


def test_levels_follow_a_chain_past_a_hub() -> None:
    chain = [[other for other in (node - 1, node + 1) if 0 <= other < 40] + [40] for node in range(40)]
    level = levels([*chain, list(range(40))])
    assert level[40] == 0
    assert sorted(level[:40].tolist()) == list(range(40))
    assert set(np.abs(np.diff(level[:40]))) == {1}


def test_the_best_splice_of_two_plans_is_found(layers: Callable[..., Problem]) -> None:
    problem = layers(4, labels=4, nodes_per_layer=20)
    rng = np.random.default_rng(1)
    weights = [rng.integers(0, 9, (1, costs.size)).astype(float) for costs in problem.node_costs]
    edges = [(edge.source, edge.target, edge.costs) for edge in problem.edges]
    graph = Graph(Arena(), problem.node_costs, edges, weights)
    plans = [rng.integers(0, 4, len(weights)) for _ in range(2)]
    used = [sum(float(w[0, label]) for w, label in zip(weights, plan, strict=True)) for plan in plans]
    budget = np.array([0.5 * sum(used)])
    neighbours = [sorted(graph.neighbours[node]) for node in graph.nodes()]
    level = levels(neighbours)
    mixed = [
        np.where(level < cut, first, second)
        for first, second in (plans, plans[::-1])
        for cut in range(int(level.max()) + 2)
    ]
    fitting = [
        evaluate(problem, plan)[0]
        for plan in mixed
        if sum(float(w[0, label]) for w, label in zip(weights, plan, strict=True)) <= budget[0]
    ]
    best = splice(graph, plans, np.array([0]), budget)
    assert best is not None
    assert np.isclose(evaluate(problem, best)[0], min(fitting), rtol=1e-12)


def test_no_splice_is_returned_when_none_fits() -> None:
    graph = Graph(Arena(), [np.zeros(2)], [], [np.ones((1, 2))])
    assert splice(graph, [np.array([0]), np.array([1])], np.array([0]), np.array([0.5])) is None


def test_of_cuts_sorted_by_cost_the_first_accepted_one_is_taken() -> None:
    # Eight nodes in a row: plan 0 is free and full, plan 1 costs 1 s per node and is empty; the graph knows no budget.
    costs = [np.array([0.0, 1.0])] * 8
    edges = [(i, i + 1, np.zeros((2, 2))) for i in range(7)]
    graph = Graph(Arena(), costs, edges, [np.array([[10.0, 0.0]])] * 8)
    plans = [np.zeros(8, dtype=np.int64), np.ones(8, dtype=np.int64)]
    found = splice(graph, plans, np.array([0]), np.array([np.inf]), lambda labels: int((labels == 0).sum()) <= 5)
    assert found is not None
    assert int((found == 0).sum()) == 5
    assert splice(graph, plans, np.array([0]), np.array([np.inf]), lambda labels: False) is None
