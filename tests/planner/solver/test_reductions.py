from collections.abc import Callable

import numpy as np
import pytest

from autopar.planner.solver import Problem, evaluate
from autopar.planner.solver.arena import Arena
from autopar.planner.solver.exact import value_of
from autopar.planner.solver.reductions import Graph, back_substitute, simplify
from autopar.planner.solver.solution import Dominate, Eliminate


def graph_of(costs: list[list[float]], edges: list[tuple[int, int, list[list[float]]]]) -> Graph:
    return Graph(Arena(), [np.array(row) for row in costs], [(u, v, np.array(matrix)) for u, v, matrix in edges])


def test_a_lone_node_takes_its_cheapest_label() -> None:
    graph = graph_of([[3.0, 1.0, 2.0]], [])
    simplify(graph)
    assert graph.constant == 1.0
    assert back_substitute(graph, {}).tolist() == [1]


def test_a_dominated_label_goes() -> None:
    graph = graph_of([[0.0, 5.0], [0.0, 0.0]], [(0, 1, [[0.0, 1.0], [1.0, 0.0]])])
    simplify(graph)
    assert isinstance(graph.steps[0], Dominate)
    assert graph.steps[0].kept.tolist() == [0]


def test_a_label_that_may_pay_off_stays() -> None:
    cheap_with_neighbour = [(0, 1, [[0.0, 9.0], [9.0, 0.0]]), (0, 2, [[0.0, 9.0], [9.0, 0.0]])]
    graph = graph_of([[0.0, 5.0], [9.0, 0.0], [9.0, 0.0]], cheap_with_neighbour)
    simplify(graph)
    assert (graph.constant, back_substitute(graph, {}).tolist()) == (5.0, [1, 1, 1])


def test_a_leaf_is_folded_into_its_neighbour() -> None:
    graph = graph_of([[0.0, 2.0], [1.0, 0.0]], [(0, 1, [[0.0, 4.0], [1.0, 0.0]])])
    simplify(graph)
    assert graph.constant == 1.0
    assert graph.nodes() == []


def test_a_node_between_two_becomes_an_edge() -> None:
    matrix = [[0.0, 4.0], [4.0, 0.0]]
    graph = graph_of([[0.0, 1.0]] * 3, [(0, 1, matrix), (1, 2, matrix), (0, 2, [[0.0, 0.0], [0.0, -9.0]])])
    simplify(graph)
    assert graph.constant == -6.0
    assert back_substitute(graph, {}).tolist() == [1, 1, 1]


def test_parallel_edges_add_up_whatever_their_direction() -> None:
    graph = graph_of([[0.0, 0.0], [0.0, 0.0, 0.0]], [])
    graph.add_edge(0, 1, graph.arena.token(np.arange(6.0).reshape(2, 3)))
    graph.add_edge(1, 0, graph.arena.token(np.arange(6.0).reshape(3, 2)))
    expected = np.arange(6.0).reshape(2, 3) + np.arange(6.0).reshape(3, 2).T
    assert np.array_equal(graph.arena[graph.neighbours[0][1]], expected)
    assert np.array_equal(graph.arena[graph.neighbours[1][0]], expected.T)


def test_a_loop_joins_the_node_cost() -> None:
    graph = graph_of([[1.0, 2.0]], [(0, 0, [[10.0, 99.0], [99.0, 20.0]])])
    assert graph.arena[graph.costs[0]].tolist() == [11.0, 22.0]


def test_a_node_that_weighs_is_kept_and_a_lighter_label_is_not_dominated() -> None:
    weights = [np.array([[5.0, 1.0]]), np.zeros((1, 2))]
    graph = Graph(Arena(), [np.array([0.0, 3.0]), np.zeros(2)], [(0, 1, np.eye(2))], weights)
    simplify(graph)
    assert graph.nodes() == [0]
    assert graph.domains[0].tolist() == [0, 1]
    assert Eliminate(node=1) in graph.steps


def test_repeated_layers_are_computed_once(layers: Callable[..., Problem]) -> None:
    derived = []
    for count in (4, 12):
        problem = layers(count, labels=5, nodes_per_layer=20)
        edges = [(edge.source, edge.target, edge.costs) for edge in problem.edges]
        graph = Graph(Arena(), problem.node_costs, edges)
        simplify(graph)
        derived.append(len(graph.arena._derived))
    assert derived[1] <= 1.2 * derived[0]


@pytest.mark.parametrize("seed", range(40))
def test_back_substitution_attains_what_the_reduced_graph_promises(
    seed: int, random_problem: Callable[..., Problem]
) -> None:
    problem = random_problem(seed)
    graph = Graph(Arena(), problem.node_costs, [(e.source, e.target, e.costs) for e in problem.edges])
    simplify(graph)
    rest = {node: int(graph.domains[node][-1]) for node in graph.nodes()}
    labels = back_substitute(graph, rest)
    assert np.isclose(evaluate(problem, labels)[0], value_of(graph, labels), rtol=1e-12)
