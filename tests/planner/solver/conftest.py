"""Random problems small enough to enumerate, and a synthetic model of repeated layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from autopar.planner.solver import Edge, MemoryRow, Problem

Factory = Callable[..., Problem]


def build_random_problem(
    seed: int, *, rows: int = 0, density: float = 0.6, tightness: float = 0.5, digits: int = 4
) -> Problem:
    """5-8 nodes, 2-4 labels, edges in both directions (so parallel ones), loops, and many equal costs."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 5, rng.integers(5, 9))
    scale = 10.0**-digits
    costs = tuple(rng.integers(1, 11, size) * scale for size in sizes)
    edges = tuple(
        Edge(source=u, target=v, costs=rng.integers(0, 10, (sizes[u], sizes[v])) * scale)
        for u, v in itertools.product(range(len(sizes)), repeat=2)
        if rng.random() < density / (2 if u != v else 8)
    )
    return Problem(
        node_costs=costs,
        edges=edges,
        memory_rows=tuple(_random_row(rng, sizes, number, tightness) for number in range(rows)),
    )


def _random_row(rng: np.random.Generator, sizes: np.ndarray, number: int, tightness: float) -> MemoryRow:
    weights = {node: rng.integers(0, 6, size) * 1e9 for node, size in enumerate(sizes) if rng.random() < 0.8}
    low = sum(float(values.min()) for values in weights.values())
    high = sum(float(values.max()) for values in weights.values())
    budget = 1e9 + low + tightness * rng.random() * (high - low)
    return MemoryRow(name=f"row {number}", bytes=weights, budget_bytes=budget, constant_bytes=1e9)


def enumerate_optimum(problem: Problem) -> float:
    """Objective of the best assignment within the budgets, by trying all; infinite when none fits."""
    sizes = [costs.size for costs in problem.node_costs]
    labels = np.array(list(itertools.product(*map(range, sizes))))
    total = sum(costs[labels[:, node]] for node, costs in enumerate(problem.node_costs))
    for edge in problem.edges:
        total = total + edge.costs[labels[:, edge.source], labels[:, edge.target]]
    for row in problem.memory_rows:
        used = row.constant_bytes + sum(weights[labels[:, node]] for node, weights in row.bytes.items())
        total = np.where(used <= row.budget_bytes, total, np.inf)
    return float(np.min(total))


def build_layers(num_layers: int, *, labels: int = 25, nodes_per_layer: int = 60, seed: int = 7) -> Problem:
    """A chain of equal layers like a transformer's joint graph.

    Each has a forward half with skip edges, and a backward half that reads the forward's tensors.
    """
    rng = np.random.default_rng(seed)
    half = nodes_per_layer // 2
    compute = [rng.uniform(0.2, 2.0, labels) * 1e-4 for _ in range(nodes_per_layer)]
    # Label i costs |i - j| steps of communication to meet label j, times the size of the tensor.
    distance = np.minimum(np.abs(np.subtract.outer(np.arange(labels), np.arange(labels))), 4) * 1e-5
    moves = [distance * rng.uniform(0.5, 2.0) for _ in range(4)]
    costs, edges = [], []

    def position(layer: int, node: int) -> int:
        forward = layer * half + node
        return forward if node < half else num_layers * nodes_per_layer - 1 - (layer * half + node - half)

    for layer in range(num_layers):
        costs += [(position(layer, node), compute[node]) for node in range(nodes_per_layer)]
        for node in range(half - 1):
            edges.append((position(layer, node), position(layer, node + 1), moves[node % 4]))
            edges.append((position(layer, half + node + 1), position(layer, half + node), moves[node % 3]))
            edges.append((position(layer, node), position(layer, half + node), moves[(node + 1) % 4]))
        for node in range(0, half - 8, 8):
            edges.append((position(layer, node), position(layer, node + 8), moves[0]))
        if layer + 1 < num_layers:
            edges.append((position(layer, half - 1), position(layer + 1, 0), moves[1]))
            edges.append((position(layer + 1, half), position(layer, nodes_per_layer - 1), moves[2]))
    return Problem(
        node_costs=tuple(values for _, values in sorted(costs, key=lambda pair: pair[0])),
        edges=tuple(Edge(source=u, target=v, costs=matrix) for u, v, matrix in edges),
    )


@pytest.fixture
def random_problem() -> Factory:
    return build_random_problem


@pytest.fixture
def optimum() -> Callable[[Problem], float]:
    return enumerate_optimum


@pytest.fixture
def layers() -> Factory:
    return build_layers
