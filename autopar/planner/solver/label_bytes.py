"""Bytes of labels in many memory rows: few kinds per node, and a row says which of them counts.

Backward of layer 5 holds what layer 3 saved, or its gradient once backward has passed it. So of a hundred rows a node
knows only a few kinds of bytes, and equal layers know equal kinds, whatever rows they count in:

    row             backward 7   backward 5   backward 3      optimizer
    node of layer 3 saved        saved        saved + scratch gradient        kinds (saved, scratch, gradient), d labels

`graph_of` builds the reduced graph of a problem once, for all multipliers of all rows; `LabelBytes` prices all labels
of a core at once: the price of a kind is the sum of the multipliers of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.planner.solver.arena import Arena
from autopar.planner.solver.labelling import Floats, Integers, MemoryRow, Problem
from autopar.planner.solver.reductions import Graph, simplify


def graph_of(problem: Problem) -> Graph:
    """Return the reduced graph of `problem` with the bytes of all its rows."""
    arena = Arena()
    kinds, tokens = _kinds(arena, problem.memory_rows, len(problem.node_costs))
    weights = [
        np.array([arena[token] for token in own]) if own else np.zeros((0, len(costs)))
        for own, costs in zip(tokens, problem.node_costs, strict=True)
    ]
    edges = [(edge.source, edge.target, edge.costs) for edge in problem.edges]
    graph = Graph(arena, problem.node_costs, edges, weights, kinds)
    simplify(graph)
    return graph


def _kinds(arena: Arena, rows: Sequence[MemoryRow], num_nodes: int) -> tuple[NDArray[np.int16], list[list[int]]]:
    """(kind of every node in every row, (nodes, rows); tokens of the kinds of every node, ascending)."""
    found = np.full((num_nodes, len(rows)), -1, dtype=np.int64)
    for number, row in enumerate(rows):
        for node, values in row.bytes.items():
            found[node, number] = arena.token(values)
    tokens = [np.unique(own[own >= 0]).tolist() for own in found]
    kinds = np.array(
        [np.where(own >= 0, np.searchsorted(known, own), -1) for own, known in zip(found, tokens, strict=True)],
        dtype=np.int16,
    ).reshape(found.shape)
    return kinds, tokens


class LabelBytes:
    """The bytes of all labels of some nodes of a graph, one node after the other."""

    def __init__(self, graph: Graph, nodes: Sequence[int]) -> None:
        arrays = [graph.arena[(graph.weights or [])[node]] for node in nodes]
        sizes = np.array([values.shape[1] for values in arrays], dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        self.num_kinds = np.array([len(values) for values in arrays], dtype=np.int64)
        self.first_kind = np.cumsum(self.num_kinds) - self.num_kinds
        self.num_labels = int(sizes.sum())
        self._flat = np.concatenate([np.zeros(0), *(values.ravel() for values in arrays)])
        self._lengths = np.repeat(sizes, self.num_kinds)
        self._label_of = np.concatenate(
            [np.zeros(0, dtype=np.int64)]
            + [
                np.tile(np.arange(start, start + size), len(values))
                for start, size, values in zip(starts.tolist(), sizes.tolist(), arrays, strict=True)
            ]
        )
        kinds = graph.kinds[np.array(nodes, dtype=np.int64)]
        self._kinds = np.where(kinds >= 0, kinds + self.first_kind[:, None], -1)

    def prices(self, multipliers: Floats) -> Floats:
        """Return seconds per byte of every kind of every node."""
        rows = np.flatnonzero(multipliers)
        kinds = self._kinds[:, rows]
        node, row = np.nonzero(kinds >= 0)
        weights = multipliers[rows][row]
        return np.bincount(kinds[node, row], weights=weights, minlength=len(self._lengths)).astype(np.float64)

    def seconds(self, prices: Floats) -> Floats:
        """Return what the bytes of every label cost at these prices of the kinds."""
        costs = self._flat * np.repeat(prices, self._lengths)
        return np.bincount(self._label_of, weights=costs, minlength=self.num_labels).astype(np.float64)

    def in_rows(self, rows: Integers) -> Floats:
        """Return (rows, labels) bytes."""
        found = [
            self.seconds((np.bincount(own[own >= 0], minlength=len(self._lengths))).astype(float))
            for own in self._kinds[:, rows].T
        ]
        return np.array(found).reshape(len(rows), self.num_labels)
