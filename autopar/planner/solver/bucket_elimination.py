"""Bucket elimination: minimise nodes out one by one, whatever their degree.

Eliminating v joins everything that touches v into one table over its neighbours N(v), of prod_{u in N(v) + v}
d_u entries, and minimises over v. The order (cheapest table first) is worked out symbolically by
`elimination_order`, without touching a number, so that a hopeless problem is refused before memory is spent;
`eliminate_all` then does it. What is left is the optimum, `graph.constant`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.planner.solver.arena import Array
from autopar.planner.solver.labelling import Floats
from autopar.planner.solver.reductions import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class EliminationOrder:
    """Nodes in order of elimination, with the largest table and all tables together, in entries."""

    nodes: tuple[int, ...]
    peak_entries: int
    total_entries: int


def elimination_order(graph: Graph, peak_entries: int, total_entries: int) -> EliminationOrder | None:
    """Return the greedy order, or None when one table, or all together, would exceed these limits."""
    adjacent = {node: set(graph.neighbours[node]) for node in graph.nodes()}
    current = {node: _table_entries(graph, node, adjacent[node]) for node in adjacent}
    heap = [(entries, node) for node, entries in current.items()]
    heapq.heapify(heap)
    order: list[int] = []
    peak = total = 0
    while heap:
        entries, node = heapq.heappop(heap)
        if current.get(node) != entries:
            continue
        peak, total = max(peak, entries), total + entries
        if peak > peak_entries or total > total_entries:
            return None
        order.append(node)
        del current[node]
        neighbours = adjacent.pop(node)
        for other in neighbours:
            adjacent[other] |= neighbours
            adjacent[other] -= {node, other}
        for other in neighbours:
            current[other] = _table_entries(graph, other, adjacent[other])
            heapq.heappush(heap, (current[other], other))
    return EliminationOrder(nodes=tuple(order), peak_entries=peak, total_entries=total)


def eliminate_all(graph: Graph, order: EliminationOrder) -> None:
    """Eliminate every living node; `graph.constant` becomes the optimum and the choices are logged."""
    tables: dict[int, tuple[tuple[int, ...], int]] = {}
    touching: dict[int, set[int]] = {node: set() for node in order.nodes}
    serial = 0

    def add(scope: tuple[int, ...], token: int) -> None:
        nonlocal serial
        tables[serial] = (scope, token)
        for member in scope:
            touching[member].add(serial)
        serial += 1

    for node in sorted(order.nodes):
        add((node,), graph.costs[node])
    for u, v, matrix in graph.edges():
        add((u, v), matrix)
    for node in order.nodes:
        joined = [tables.pop(table) for table in sorted(touching[node])]
        scope = tuple(sorted({member for members, _ in joined for member in members} - {node}))
        for member in scope:
            touching[member] = {table for table in touching[member] if table in tables}
        best, choice = _join_and_minimise(graph, node, scope, joined)
        graph.remove(node, scope, graph.arena[choice])
        if scope:
            add(scope, best)
        else:
            graph.constant += float(graph.arena[best])


def _table_entries(graph: Graph, node: int, neighbours: set[int]) -> int:
    return graph.size(node) * math.prod(graph.size(other) for other in neighbours)


def _join_and_minimise(
    graph: Graph, node: int, scope: tuple[int, ...], joined: Sequence[tuple[tuple[int, ...], int]]
) -> tuple[int, int]:
    position = {member: axis for axis, member in enumerate((*scope, node))}
    shape = tuple(graph.size(member) for member in (*scope, node))
    # Sorted by content, so that the same join in another layer is the same memo entry.
    ordered = sorted((token, tuple(position[member] for member in members)) for members, token in joined)
    axes = tuple(pattern for _, pattern in ordered)

    def minimise(*arrays: Floats) -> tuple[Array, ...]:
        total = np.zeros(shape)
        for pattern, array in zip(axes, arrays, strict=True):
            total += _spread(array, pattern, shape)
        choice = np.asarray(total.argmin(axis=-1))
        best = np.take_along_axis(total, choice[..., None], axis=-1)[..., 0]
        return np.asarray(best), choice.astype(np.int16)

    best, choice = graph.arena.derive("bucket", minimise, *(token for token, _ in ordered), key=(axes, shape))
    return best, choice


def _spread(array: Floats, pattern: tuple[int, ...], shape: tuple[int, ...]) -> Floats:
    """Return `array` ready to broadcast: its axes moved to the positions `pattern` of a table of `shape`."""
    order = sorted(range(len(pattern)), key=pattern.__getitem__)
    wide = [1] * len(shape)
    for axis in order:
        wide[pattern[axis]] = shape[pattern[axis]]
    return array.transpose(order).reshape(wide)
