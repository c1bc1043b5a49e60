"""Splice two assignments: one up to a cut, the other beyond it.

Under a budget the best plan of a deep model treats some layers one way and the rest another. Neither of two
plans, one small and one fast, may be good; but the small one for just enough layers, and the fast one for the
rest, pays for the difference once, at the cut. Layers are not given, so nodes are put in breadth-first order
from one end of the graph (`levels`; nodes with very many neighbours do not count as a way). There
a layer's forward and backward nodes stand together.

    cost(t) = sum of nodes and edges, where u takes plan A if level[u] < t, else plan B,    for all t at once:
an edge between levels l <= m costs R[A, A] for t > m, R[A, B] for l < t <= m, and R[B, B] for t <= l.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from autopar.planner.solver.labelling import Floats, Integers
from autopar.planner.solver.reductions import Graph, back_substitute

HUB_DEGREE = 6.0
"""A node with more than this many times the mean number of neighbours is a hub, and 16 at least."""

MOST_PAIRS = 6
"""So many pairs of plans, those with the cheapest cuts, are looked at closely."""


def splice(
    graph: Graph,
    plans: Sequence[Integers],
    rows: Integers,
    budgets: Floats,
    accepts: Callable[[Integers], bool] | None = None,
) -> Integers | None:
    """Return the cheapest splice of two of the plans (original labels) that fits, or None.

    `budgets` (rows,) are bytes for the living nodes of `graph`, whose weights count in `rows`. `accepts` says of
    original labels whether they fit what the graph does not know; of the cuts of two plans, sorted by cost, the first
    that it accepts is found by bisection: a dearer cut saves more bytes.
    """
    if graph.weights is None or not graph.nodes():
        return None
    mixture = _Mixture(graph, plans, rows)
    pairs = []
    for a, b in itertools.permutations(range(len(plans)), 2):
        cost = np.where((mixture.usage(a, b) <= budgets[:, None]).all(axis=0), mixture.costs(a, b), np.inf)
        pairs.append((float(cost.min()), a, b, np.argsort(cost, kind="stable")[: np.count_nonzero(cost < np.inf)]))
    best: tuple[float, Integers] | None = None
    for least, a, b, cuts in sorted(pairs, key=lambda pair: pair[:3])[:MOST_PAIRS]:
        if not len(cuts) or (best is not None and least >= best[0]):
            break
        found = _first_accepted(graph, mixture, (plans[a], plans[b]), cuts, accepts)
        if found is not None:
            place, labels = found
            value = float(mixture.costs(a, b)[cuts[place]])
            if best is None or value < best[0]:
                best = value, labels
    return None if best is None else best[1]


def _first_accepted(
    graph: Graph,
    mixture: _Mixture,
    pair: tuple[Integers, Integers],
    cuts: Integers,
    accepts: Callable[[Integers], bool] | None,
) -> tuple[int, Integers] | None:
    """Return (place in `cuts`, labels) of the first splice that is accepted, None where even the last is not."""

    def at(place: int) -> Integers:
        chosen = np.where(mixture.level < cuts[place], pair[0][mixture.nodes], pair[1][mixture.nodes])
        return back_substitute(graph, dict(zip(mixture.nodes.tolist(), chosen.tolist(), strict=True)))

    first = at(0)
    if accepts is None or accepts(first):
        return 0, first
    low, high, found = 1, len(cuts) - 1, None
    while low <= high:
        middle = (low + high) // 2
        labels = at(middle)
        if accepts(labels):
            high, found = middle - 1, (middle, labels)
        else:
            low = middle + 1
    return found


class _Mixture:
    """Costs and bytes of every splice of two plans: tables over (plan of one end, plan of the other)."""

    def __init__(self, graph: Graph, plans: Sequence[Integers], rows: Integers) -> None:
        nodes, edges, arena = graph.nodes(), graph.edges(), graph.arena
        index = {node: number for number, node in enumerate(nodes)}
        labels = [np.searchsorted(graph.domains[v], [plan[v] for plan in plans]) for v in nodes]
        self.nodes = np.array(nodes)
        self.level = levels([[index[other] for other in sorted(graph.neighbours[v])] for v in nodes])
        self.unary = np.stack([arena[graph.costs[v]][chosen] for v, chosen in zip(nodes, labels, strict=True)])
        self.bytes = np.stack([graph.bytes_of(v, rows)[:, chosen] for v, chosen in zip(nodes, labels, strict=True)])
        self.low = np.zeros(len(edges), dtype=np.int64)
        self.high = np.zeros(len(edges), dtype=np.int64)
        self.pairs = np.zeros((len(edges), len(plans), len(plans)))
        for number, (u, v, matrix) in enumerate(edges):
            table = arena[matrix][np.ix_(labels[index[u]], labels[index[v]])]
            ends = int(self.level[index[u]]), int(self.level[index[v]])
            self.low[number], self.high[number] = min(ends), max(ends)
            self.pairs[number] = table if ends[0] <= ends[1] else table.T

    def costs(self, a: int, b: int) -> Floats:
        """Return the seconds for every cut, plan a below and plan b from there on."""
        size, pairs = int(self.level.max()) + 2, self.pairs
        enter = np.bincount(self.low + 1, weights=pairs[:, a, b] - pairs[:, b, b], minlength=size)
        leave = np.bincount(self.high + 1, weights=pairs[:, a, a] - pairs[:, a, b], minlength=size)
        edges = pairs[:, b, b].sum() + np.cumsum(enter + leave)
        return np.asarray(edges + _node_sums(self.level, self.unary[:, a], self.unary[:, b]))

    def usage(self, a: int, b: int) -> Floats:
        """Return the bytes (rows, cuts)."""
        rows = range(self.bytes.shape[1])
        return np.stack([_node_sums(self.level, self.bytes[:, k, a], self.bytes[:, k, b]) for k in rows])


def levels(neighbours: Sequence[Sequence[int]]) -> Integers:
    """Return breadth-first levels from a far end of each connected part, part after part; hubs get 0."""
    degrees = np.array([len(others) for others in neighbours])
    is_hub = degrees > max(16.0, HUB_DEGREE * float(degrees.mean()))
    level = np.where(is_hub, 0, -1)
    offset = 0
    for start in range(len(neighbours)):
        if level[start] < 0:
            far = max(_distances(neighbours, start, is_hub).items(), key=lambda pair: (pair[1], -pair[0]))[0]
            distances = _distances(neighbours, far, is_hub)
            for node, distance in distances.items():
                level[node] = offset + distance
            offset += max(distances.values()) + 1
    return np.asarray(level)


def _distances(neighbours: Sequence[Sequence[int]], start: int, is_hub: np.ndarray) -> dict[int, int]:
    distances, queue = {start: 0}, deque([start])
    while queue:
        node = queue.popleft()
        for other in neighbours[node]:
            if other not in distances and not is_hub[other]:
                distances[other] = distances[node] + 1
                queue.append(other)
    return distances


def _node_sums(level: Integers, below: Floats, above: Floats) -> Floats:
    """Return for every cut t = 0 .. levels the sum of `below` where level < t and `above` elsewhere."""
    change = np.bincount(level + 1, weights=below - above)
    return np.asarray(above.sum() + np.cumsum(change))
