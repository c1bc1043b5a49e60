"""Exact reductions of a pairwise problem: the smaller problem has the optimum of the larger one.

- *Dominance* (Goldstein's dead-end elimination, `_remove_dominated`): drop label b of v if for some label a
      c_v[a] - c_v[b] + sum_u max_t (R_vu[a, t] - R_vu[b, t]) <= 0,
  since swapping b for a never costs more, whatever the neighbours u do. With memory rows a must also weigh no
  more in any row.
- *Degree 0* (`_settle`): a lone node takes its cheapest label; the constant takes the cost.
- *Degree 1* (`_fold_leaf`):  c_u[j] += min_i c_v[i] + R_vu[i, j].
- *Degree 2* (`_fold_series`): a new edge  q[j, k] = min_i c_v[i] + R_va[i, j] + R_vb[i, k]  replaces v.
- *Parallel edges* (`Graph.add_edge`): edges between the same nodes are added; a loop joins the node cost.
- *One label left* (`_fold_fixed`): each edge becomes a row added to the neighbour's cost.

Elimination forgets what the node weighs, so a node whose labels weigh differently is never eliminated.
`Graph.steps` logs what was done, for `back_substitute` (choices) and for the certificate. Arrays are arena
tokens: a repeated layer costs one computation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.planner.solver.arena import Arena, Array
from autopar.planner.solver.labelling import Floats, Integers
from autopar.planner.solver.solution import Dominate, Eliminate, Step

CHUNK_ENTRIES = 200_000
"""Temporary tables stay below about this many numbers (1.6 MB), which keeps them in the cache."""
SCREEN_LABELS = 6
"""A pair of labels is first compared at about this many labels of every neighbour, before all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestLabels:
    """The best label position of `node` for every combination of label positions of `neighbours`."""

    node: int
    neighbours: tuple[int, ...]
    table: Array
    domain: Integers
    neighbour_domains: tuple[Integers, ...]


class Graph:
    """A pairwise problem that shrinks. Nodes keep their numbers; `domains` are the original labels left."""

    def __init__(
        self,
        arena: Arena,
        node_costs: Sequence[Floats],
        edges: Sequence[tuple[int, int, Floats]],
        weights: Sequence[Floats] | None = None,
        kinds: NDArray[np.int16] | None = None,
        tolerance: float = 0.0,
    ) -> None:
        """`weights[v]` is (kinds, d_v) bytes; `kinds[v, k]` says which of them count in memory row k, -1 for none.
        Without `kinds` there is one per row.

        `tolerance` in seconds absorbs rounding in the dominance test.
        """
        self.arena = arena
        self.costs = [arena.token(costs) for costs in node_costs]
        self.weights = None if weights is None else [arena.token(rows) for rows in weights]
        self.neighbours: list[dict[int, int]] = [{} for _ in node_costs]
        self.domains: list[Integers] = [np.arange(costs.size) for costs in node_costs]
        self.alive = [True] * len(self.costs)
        self.constant = 0.0
        if kinds is None:
            rows = len(weights[0]) if weights else 0
            kinds = np.broadcast_to(np.arange(rows, dtype=np.int16), (len(self.costs), rows))
        self.kinds = kinds
        self.weight_constant: Floats = np.zeros(kinds.shape[1])
        self.tolerance = tolerance
        self.steps: list[Step] = []
        self.choices: list[BestLabels] = []
        for source, target, costs in edges:
            self.add_edge(source, target, arena.token(costs))

    def copy(self) -> Graph:
        """Return an independent graph that shares the arena."""
        twin = object.__new__(Graph)
        twin.__dict__.update(self.__dict__)
        twin.costs, twin.domains, twin.alive = list(self.costs), list(self.domains), list(self.alive)
        twin.weights = None if self.weights is None else list(self.weights)
        twin.neighbours = [dict(row) for row in self.neighbours]
        twin.steps, twin.choices = list(self.steps), list(self.choices)
        return twin

    def nodes(self) -> list[int]:
        """Return the nodes still alive, ascending."""
        return [node for node, alive in enumerate(self.alive) if alive]

    def edges(self) -> list[tuple[int, int, int]]:
        """Return (u, v, token of R_uv) with u < v, sorted."""
        return [(u, v, self.neighbours[u][v]) for u in self.nodes() for v in sorted(self.neighbours[u]) if u < v]

    def size(self, node: int) -> int:
        """Return how many labels `node` still has."""
        return len(self.domains[node])

    def num_labels(self) -> int:
        """Return the labels of all living nodes together."""
        return sum(self.size(node) for node in self.nodes())

    def transpose(self, matrix: int) -> int:
        """Return the token of the transposed matrix."""
        (result,) = self.arena.derive("transpose", lambda values: (np.ascontiguousarray(values.T),), matrix)
        self.arena.remember("transpose", result, matrix)
        return result

    def add_edge(self, source: int, target: int, matrix: int) -> None:
        """Add an edge; merge it with a parallel one, or into the node cost when it is a loop."""
        if source == target:
            (loop,) = self.arena.derive("diagonal", lambda values: (np.diagonal(values).copy(),), matrix)
            self.add_cost(source, loop)
            return
        present = self.neighbours[source].get(target)
        if present is not None:
            (matrix,) = self.arena.derive("add", _add, *sorted((present, matrix)))
        self.neighbours[source][target] = matrix
        self.neighbours[target][source] = self.transpose(matrix)

    def add_cost(self, node: int, costs: int) -> None:
        """Add (d,) seconds to the labels of `node`."""
        (self.costs[node],) = self.arena.derive("add", _add, self.costs[node], costs)

    def restrict(self, node: int, kept: Integers) -> None:
        """Keep only the labels at these positions of the present domain.

        The caller logs why that is allowed.
        """
        key = kept.tobytes()
        self.domains[node] = self.domains[node][kept]
        (self.costs[node],) = self.arena.derive("take", lambda values: (values[kept],), self.costs[node], key=key)
        if self.weights is not None:
            (self.weights[node],) = self.arena.derive(
                "take columns",
                lambda values: (np.ascontiguousarray(values[:, kept]),),
                self.weights[node],
                key=key,
            )
        for other, matrix in list(self.neighbours[node].items()):
            (rows,) = self.arena.derive("take", lambda values: (values[kept],), matrix, key=key)
            self.neighbours[node][other] = rows
            self.neighbours[other][node] = self.transpose(rows)

    def remove(self, node: int, neighbours: tuple[int, ...], table: Array) -> None:
        """Mark `node` eliminated and log how to choose its label later."""
        for other in self.neighbours[node]:
            del self.neighbours[other][node]
        self.neighbours[node] = {}
        self.alive[node] = False
        self.steps.append(Eliminate(node=node))
        domains = tuple(self.domains[other] for other in neighbours)
        self.choices.append(
            BestLabels(
                node=node,
                neighbours=neighbours,
                table=table,
                domain=self.domains[node],
                neighbour_domains=domains,
            )
        )

    def bytes_of(self, node: int, rows: Integers) -> Floats:
        """Return (rows, d) bytes of the labels of `node` in these memory rows."""
        if self.weights is None:
            raise AssertionError("a graph with budgets has weights")
        values = self.arena[self.weights[node]]
        return np.asarray(np.concatenate([values, np.zeros((1, self.size(node)))])[self.kinds[node, rows]])

    def prices_of(self, node: int, multipliers: Floats) -> Floats:
        """Return (kinds,) seconds per byte, the sum over the rows in which a kind of bytes counts."""
        kinds = self.kinds[node]
        counted = kinds >= 0
        number = 0 if self.weights is None else len(self.arena[self.weights[node]])
        return np.bincount(kinds[counted], weights=multipliers[counted], minlength=number).astype(np.float64)

    def weighs_equally(self, node: int) -> bool:
        """Return whether the label of `node` makes no difference to any memory row."""
        if self.weights is None:
            return True
        rows = self.arena[self.weights[node]]
        return bool((rows == rows[:, :1]).all())


def simplify(graph: Graph) -> None:
    """Apply all reductions until none applies.

    Deterministic: nodes in order, neighbours of a change again.
    """
    queue = deque(graph.nodes())
    waiting = set(queue)
    while queue:
        node = queue.popleft()
        waiting.discard(node)
        if not graph.alive[node]:
            continue
        touched = list(graph.neighbours[node])
        if _reduce(graph, node):
            again = [other for other in [*touched, node] if graph.alive[other] and other not in waiting]
            queue.extend(again)
            waiting.update(again)


def back_substitute(graph: Graph, labels: Mapping[int, int]) -> Integers:
    """Return original labels of all nodes, given original labels of the living ones."""
    chosen = dict(labels)
    for choice in reversed(graph.choices):
        index = tuple(
            int(np.searchsorted(domain, chosen[other]))
            for other, domain in zip(choice.neighbours, choice.neighbour_domains, strict=True)
        )
        chosen[choice.node] = int(choice.domain[int(choice.table[index])])
    return np.array([chosen[node] for node in range(len(graph.alive))], dtype=np.int64)


def _reduce(graph: Graph, node: int) -> bool:
    """Apply the first reductions that fit `node`; return whether its neighbours should be looked at again."""
    changed = _remove_dominated(graph, node)
    if not graph.weighs_equally(node):
        return changed
    degree = len(graph.neighbours[node])
    if degree > 2 and graph.size(node) > 1:
        return changed
    _absorb_weight(graph, node)
    if degree == 0:
        _settle(graph, node)
    elif graph.size(node) == 1:
        _fold_fixed(graph, node)
    elif degree == 1:
        _fold_leaf(graph, node)
    else:
        _fold_series(graph, node)
    return True


def _remove_dominated(graph: Graph, node: int) -> bool:
    if graph.size(node) == 1:
        return False
    matrices = sorted(graph.neighbours[node].values())
    weights = [] if graph.weights is None else [graph.weights[node]]

    def undominated(costs: Floats, *rest: Floats) -> tuple[Integers]:
        return (_undominated(costs, rest[len(weights) :], rest[: len(weights)], graph.tolerance),)

    (token,) = graph.arena.derive("undominated", undominated, graph.costs[node], *weights, *matrices, key=len(weights))
    kept = graph.arena[token]
    if len(kept) == graph.size(node):
        return False
    graph.restrict(node, kept)
    graph.steps.append(Dominate(node=node, kept=graph.domains[node]))
    return True


def _undominated(costs: Floats, matrices: Sequence[Floats], weights: Sequence[Floats], tolerance: float) -> Integers:
    """Return the positions that survive. The most expensive labels go first: of equals the cheapest stays."""
    better, worse = np.nonzero(_may_dominate(costs, matrices, weights, tolerance))
    worst = costs[better] - costs[worse]
    for matrix in matrices:
        rows = max(1, CHUNK_ENTRIES // matrix.shape[1])
        gains = [
            (matrix[better[i : i + rows]] - matrix[worse[i : i + rows]]).max(axis=1)
            for i in range(0, len(better), rows)
        ]
        worst = worst + np.concatenate([np.zeros(0), *gains])
    dominates = np.zeros((costs.size, costs.size), dtype=bool)
    dominates[better, worse] = worst <= tolerance
    kept = np.ones(costs.size, dtype=bool)
    for label in np.argsort(-costs, kind="stable"):
        kept[label] = not (dominates[:, label] & kept).any()
    return np.flatnonzero(kept)


def _may_dominate(
    costs: Floats, matrices: Sequence[Floats], weights: Sequence[Floats], tolerance: float
) -> NDArray[np.bool_]:
    """Mark pairs (a, b) that a few labels t of each neighbour do not rule out: most pairs end here, cheaply."""
    least = costs[:, None] - costs[None, :]
    for matrix in matrices:
        some = np.ascontiguousarray(matrix[:, :: max(1, matrix.shape[1] // SCREEN_LABELS)].T)
        least += (some[:, :, None] - some[:, None, :]).max(axis=0)
    possible = least <= tolerance
    for rows in weights:
        possible &= (rows[:, :, None] <= rows[:, None, :]).all(axis=0)
    np.fill_diagonal(possible, False)
    return np.asarray(possible)


def _absorb_weight(graph: Graph, node: int) -> None:
    if graph.weights is not None:
        values = np.append(graph.arena[graph.weights[node]][:, 0], 0.0)
        graph.weight_constant = graph.weight_constant + values[graph.kinds[node]]


def _settle(graph: Graph, node: int) -> None:
    costs = graph.arena[graph.costs[node]]
    best = int(costs.argmin())
    graph.constant += float(costs[best])
    graph.remove(node, (), np.array(best))


def _fold_fixed(graph: Graph, node: int) -> None:
    for other, matrix in graph.neighbours[node].items():
        (row,) = graph.arena.derive("first row", lambda values: (values[0],), matrix)
        graph.add_cost(other, row)
    graph.constant += float(graph.arena[graph.costs[node]][0])
    graph.remove(node, (), np.array(0))


def _fold_leaf(graph: Graph, node: int) -> None:
    ((other, matrix),) = graph.neighbours[node].items()
    costs, table = graph.arena.derive("fold leaf", _best_of_leaf, graph.costs[node], matrix)
    graph.remove(node, (other,), graph.arena[table])
    graph.add_cost(other, costs)


def _fold_series(graph: Graph, node: int) -> None:
    (first, left), (second, right) = sorted(graph.neighbours[node].items())
    matrix, table = graph.arena.derive("fold series", _best_of_series, graph.costs[node], left, right)
    graph.remove(node, (first, second), graph.arena[table])
    graph.add_edge(first, second, matrix)


def _best_of_leaf(costs: Floats, matrix: Floats) -> tuple[Floats, Array]:
    total = costs[:, None] + matrix
    return total.min(axis=0), total.argmin(axis=0)


def _best_of_series(costs: Floats, left: Floats, right: Floats) -> tuple[Floats, Array]:
    ahead = (left + costs[:, None]).T
    behind = np.ascontiguousarray(right.T)
    rows = max(1, CHUNK_ENTRIES // behind.size)
    best, table = [], []
    for start in range(0, ahead.shape[0], rows):
        total = ahead[start : start + rows, None, :] + behind[None, :, :]
        chosen = total.argmin(axis=2)
        table.append(chosen.astype(np.int16))
        best.append(np.take_along_axis(total, chosen[:, :, None], axis=2)[:, :, 0])
    return np.concatenate(best), np.concatenate(table)


def _add(first: Floats, second: Floats) -> tuple[Floats]:
    return (first + second,)
