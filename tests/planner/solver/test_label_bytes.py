from collections.abc import Callable

import numpy as np
import pytest

from autopar.planner.solver import MemoryRow, Problem
from autopar.planner.solver.label_bytes import LabelBytes, graph_of
from autopar.planner.solver.reductions import Graph


def dense(problem: Problem, node: int) -> np.ndarray:
    """(rows, d) bytes as the problem says them."""
    nothing = np.zeros(problem.node_costs[node].size)
    return np.array([row.bytes.get(node, nothing) for row in problem.memory_rows])


def living(graph: Graph) -> list[int]:
    nodes = graph.nodes()
    assert nodes, "presolving leaves something to look at"
    return nodes


@pytest.mark.parametrize("seed", range(10))
def test_prices_of_kinds_are_prices_of_rows(seed: int, random_problem: Callable[..., Problem]) -> None:
    problem = random_problem(seed, rows=5)
    graph = graph_of(problem)
    nodes = living(graph)
    multipliers = np.random.default_rng(seed).random(5) * np.array([1.0, 0.0, 1.0, 1.0, 0.0])
    found = LabelBytes(graph, nodes)
    expected = [multipliers @ dense(problem, node)[:, graph.domains[node]] for node in nodes]
    assert np.allclose(found.seconds(found.prices(multipliers)), np.concatenate(expected))
    rows = np.array([3, 1])
    expected = [dense(problem, node)[rows][:, graph.domains[node]] for node in nodes]
    assert (found.in_rows(rows) == np.concatenate(expected, axis=1)).all()
    for node in nodes:
        assert (graph.bytes_of(node, rows) == dense(problem, node)[rows][:, graph.domains[node]]).all()


def test_equal_layers_have_equal_kinds_whatever_rows_they_count_in() -> None:
    saved, gradient = np.array([4.0, 0.0]), np.array([0.0, 1.0])
    layers = range(3)
    rows = tuple(
        MemoryRow(
            name=f"backward {now}",
            bytes={layer: saved if layer <= now else gradient for layer in layers},
            budget_bytes=9.0,
        )
        for now in layers
    )
    problem = Problem(node_costs=tuple(np.array([1.0, 2.0]) for _ in layers), edges=(), memory_rows=rows)
    graph = graph_of(problem)
    assert graph.nodes() == list(layers)
    assert graph.weights is not None
    assert graph.weights[1] == graph.weights[2]
    assert graph.kinds.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]


def test_bytes_that_all_labels_share_count_in_their_rows_only() -> None:
    rows = tuple(
        MemoryRow(name=str(number), bytes={0: np.array([7.0, 7.0])} if number else {}, budget_bytes=9.0)
        for number in range(2)
    )
    graph = graph_of(Problem(node_costs=(np.array([1.0, 2.0]),), edges=(), memory_rows=rows))
    assert graph.nodes() == []
    assert graph.weight_constant.tolist() == [0.0, 7.0]
