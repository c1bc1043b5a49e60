from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autopar.planner.solver import MemoryRow, Problem, relaxation
from autopar.planner.solver.arena import Arena
from autopar.planner.solver.deadline import Deadline
from autopar.planner.solver.label_bytes import graph_of
from autopar.planner.solver.reductions import Graph, simplify
from autopar.planner.solver.relaxation import Relaxation


def weighted_graph(problem: Problem) -> Graph:
    rows = problem.memory_rows
    weights = [
        np.stack([row.bytes.get(node, np.zeros(costs.size)) for row in rows])
        for node, costs in enumerate(problem.node_costs)
    ]
    edges = [(edge.source, edge.target, edge.costs) for edge in problem.edges]
    graph = Graph(Arena(), problem.node_costs, edges, weights)
    simplify(graph)
    return graph


@pytest.mark.parametrize("seed", range(30))
def test_every_look_bounds_the_optimum(
    seed: int, random_problem: Callable[..., Problem], optimum: Callable[[Problem], float]
) -> None:
    problem = random_problem(seed, rows=2, tightness=0.8)
    graph = weighted_graph(problem)
    assert graph.nodes(), "presolving leaves something to look at"
    budgets = np.array([row.budget_bytes - row.constant_bytes for row in problem.memory_rows])
    dual, best = Relaxation(graph, budgets), optimum(problem)
    rng = np.random.default_rng(seed)
    for scale in (0.0, 1e-14, 1e-13, 1e-12, 1e-14):
        look = dual.look(scale * rng.random(2), 4, Deadline.after(None))
        assert look.bound <= best * (1 + 1e-9)
        for labels in look.assignments:
            positions = dual.positions(labels)
            assert positions is not None
            assert (dual.original(positions) == labels).all()


def test_prices_of_single_layers_are_proven_on_all_layers(
    monkeypatch: pytest.MonkeyPatch, layers: Callable[..., Problem]
) -> None:
    """Every layer has scratch in a row of its own, so that no two layers cost the same once two rows have a price."""
    num_layers, half = 12, 30
    free = layers(num_layers)
    scratch = np.linspace(0.0, 5.0, 25)
    rows = tuple(
        MemoryRow(name=str(layer), bytes={layer * half: scratch}, budget_bytes=1.0) for layer in range(num_layers)
    )
    problem = replace(free, memory_rows=rows)
    graph, budgets = graph_of(problem), np.ones(num_layers)
    prices = np.linspace(0.0, 2e-4, num_layers)
    monkeypatch.setattr(relaxation, "FEWEST_NODES", 10_000)
    plain = Relaxation(graph, budgets)
    assert plain.lifting is None
    monkeypatch.setattr(relaxation, "FEWEST_NODES", 50)
    lifted = Relaxation(graph, budgets)
    assert lifted.lifting is not None
    looks = [each.look(prices, 60, Deadline.after(None)) for each in (plain, lifted)]
    assert all(look.is_met for look in looks)
    assert looks[0].bound == pytest.approx(looks[1].bound, rel=1e-4)
    unpriced = lifted.look(np.zeros(num_layers), 60, Deadline.after(None))
    assert unpriced.bound < looks[1].bound + float(prices @ budgets)


@pytest.mark.parametrize("sweeps", [4, 5, 7])
def test_a_look_rounds_half_way_and_at_its_end(
    sweeps: int, monkeypatch: pytest.MonkeyPatch, random_problem: Callable[..., Problem]
) -> None:
    problem = random_problem(1, rows=2, tightness=0.8)
    graph = weighted_graph(problem)
    budgets = np.array([row.budget_bytes - row.constant_bytes for row in problem.memory_rows])
    monkeypatch.setattr(relaxation, "MET", -np.inf)  # no look ends early
    look = Relaxation(graph, budgets).look(np.zeros(2), sweeps, Deadline.after(None))
    assert len(look.assignments) == {4: 2, 5: 3, 7: 3}[sweeps]
    assert np.isfinite(look.bound)
