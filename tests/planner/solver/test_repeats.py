from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.planner.solver import Problem
from autopar.planner.solver.arena import Arena
from autopar.planner.solver.dual_ascent import Core
from autopar.planner.solver.exact import core_of
from autopar.planner.solver.reductions import Graph
from autopar.planner.solver.repeats import KEPT_AFTER, KEPT_BEFORE, find_repeats, shorten


def core_from(problem: Problem) -> Core:
    edges = [(edge.source, edge.target, edge.costs) for edge in problem.edges]
    return core_of(Graph(Arena(), problem.node_costs, edges))[0]


def test_the_shift_goes_from_each_layer_to_the_next(layers: Callable[..., Problem]) -> None:
    core = core_from(layers(16, labels=3, nodes_per_layer=20))
    repeats = find_repeats(core)
    assert repeats is not None
    assert abs(repeats.num_layers - 16) <= 2
    assert len(repeats.shift) > 0.7 * len(core.costs)
    wiring = {(u, v): matrix for u, v, matrix in core.edges}
    for node, copy in repeats.shift.items():
        assert core.costs[node] == core.costs[copy]
    moved = [(repeats.shift.get(u), repeats.shift.get(v), matrix) for u, v, matrix in core.edges]
    kept = [wiring.get((u, v), wiring.get((v, u))) == m for u, v, m in moved if u is not None and v is not None]
    assert np.mean(kept) > 0.95


def test_a_short_copy_stands_for_every_node_and_edge(layers: Callable[..., Problem]) -> None:
    core = core_from(layers(16, labels=3, nodes_per_layer=20))
    short = shorten(core)
    assert short is not None
    assert len(short.core.costs) <= (KEPT_BEFORE + KEPT_AFTER + 2) * 20
    assert (short.nodes >= 0).all()
    assert (short.edges >= 0).mean() > 0.95
    for node, source in enumerate(short.nodes):
        assert core.costs[node] == short.core.costs[source]
    for (_, _, matrix), source in zip(core.edges, short.edges, strict=True):
        assert source < 0 or short.core.edges[source][2] == matrix


def test_short_and_irregular_problems_have_no_short_copy(
    layers: Callable[..., Problem], random_problem: Callable[..., Problem]
) -> None:
    assert shorten(core_from(layers(4, labels=3, nodes_per_layer=20))) is None
    assert all(shorten(core_from(random_problem(seed))) is None for seed in range(20))


def test_two_kinds_of_layers_are_both_cut(layers: Callable[..., Problem]) -> None:
    parts = [layers(16, labels=3, nodes_per_layer=20, seed=seed) for seed in (7, 8)]
    both = Problem(
        node_costs=parts[0].node_costs + parts[1].node_costs,
        edges=parts[0].edges
        + tuple(replace(edge, source=edge.source + 320, target=edge.target + 320) for edge in parts[1].edges),
    )
    short = shorten(core_from(both))
    assert short is not None
    assert len(short.core.costs) < 2 * 9 * 20
    assert short.nodes.max() < len(short.core.costs)
    assert short.edges.max() < len(short.core.edges)
