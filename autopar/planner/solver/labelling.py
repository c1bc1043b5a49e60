"""The question the solver answers: one label per node, pairwise costs, byte budgets.

    minimise    sum_v c_v[x_v]  +  sum_(u,v) R_uv[x_u, x_v]          over x_v in {0 .. d_v - 1}
    subject to  constant_k + sum_v m_kv[x_v]  <=  budget_k           for every memory row k
                x_v = labels[x_u]                                    for every tie u -> v

A node is a planner decision, a label one of its strategies, an edge a redistribution. Plain numpy: nothing
here knows torch or a solver library. Arrays of repeated layers may be the same object or merely equal; the
solver recognises equal content.

    Problem(node_costs=(np.array([1.0, 2.0]), np.array([3.0, 1.0])),
            edges=(Edge(source=0, target=1, costs=np.array([[0.0, 5.0], [5.0, 0.0]])),))  # (1, 1): 3 s
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

FORBIDDEN = 1e6
"""Cost in seconds of a label or pair that must not be chosen.

Finite, because inf - inf has no value in a message.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Cost `costs[i, j]` in seconds when `source` takes label i and `target` takes label j."""

    source: int
    target: int
    costs: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """`constant_bytes + sum of bytes[node][label] <= budget_bytes`; a node not named weighs nothing."""

    name: str
    bytes: Mapping[int, Floats]
    budget_bytes: float
    constant_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """`target` takes label `labels[i]` when `source` takes label i; `labels` has shape (d_source,)."""

    source: int
    target: int
    labels: Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Node costs (d_v,) and edge costs (d_u, d_v) in seconds, with memory rows in bytes.

    Raises ValueError when an array is empty, not finite, of the wrong shape, or names a node that does not
    exist; and when a node is the target of two ties, or of itself along a chain of ties.
    """

    node_costs: tuple[Floats, ...]
    edges: tuple[Edge, ...]
    memory_rows: tuple[MemoryRow, ...] = ()
    names: tuple[str, ...] = ()
    ties: tuple[Tie, ...] = ()

    def __post_init__(self) -> None:
        _check_nodes(self)
        _check_edges(self)
        _check_rows(self)
        _check_ties(self)


def evaluate(problem: Problem, assignment: Integers) -> tuple[float, tuple[float, ...]]:
    """Return (objective in seconds, bytes of every memory row) of one label per node."""
    labels = assignment.tolist()
    objective = sum(float(costs[label]) for costs, label in zip(problem.node_costs, labels, strict=True))
    objective += sum(float(edge.costs[labels[edge.source], labels[edge.target]]) for edge in problem.edges)
    return objective, tuple(
        row.constant_bytes + sum(float(weights[labels[node]]) for node, weights in row.bytes.items())
        for row in problem.memory_rows
    )


def is_forbidden(values: Floats) -> NDArray[np.bool_]:
    """Mark the entries that contain FORBIDDEN, also after an ordinary cost was added to it."""
    return np.asarray(values >= 0.5 * FORBIDDEN)


def _name(problem: Problem, node: int) -> str:
    return f"node {node} ({problem.names[node]})" if problem.names else f"node {node}"


def _check_nodes(problem: Problem) -> None:
    if problem.names and len(problem.names) != len(problem.node_costs):
        raise ValueError(
            f"{len(problem.names)} names for {len(problem.node_costs)} nodes: give one name per node or none"
        )
    finite: set[int] = set()
    for node, costs in enumerate(problem.node_costs):
        if costs.ndim != 1 or not costs.size:
            raise ValueError(f"{_name(problem, node)} has costs of shape {costs.shape}: expected (d,) with d >= 1")
        _check_finite(costs, finite, _name(problem, node))


def _check_edges(problem: Problem) -> None:
    finite: set[int] = set()
    nodes = len(problem.node_costs)
    for edge in problem.edges:
        if not (0 <= edge.source < nodes and 0 <= edge.target < nodes):
            raise ValueError(f"edge {edge.source} -> {edge.target} names a node outside 0 .. {nodes - 1}")
        expected = (problem.node_costs[edge.source].size, problem.node_costs[edge.target].size)
        ends = f"edge {_name(problem, edge.source)} -> {_name(problem, edge.target)}"
        if edge.costs.shape != expected:
            raise ValueError(f"{ends} has costs of shape {edge.costs.shape}: its nodes have {expected} labels")
        _check_finite(edge.costs, finite, ends)


def _check_rows(problem: Problem) -> None:
    finite: set[int] = set()
    for row in problem.memory_rows:
        for node, weights in row.bytes.items():
            if not 0 <= node < len(problem.node_costs):
                raise ValueError(f"memory row {row.name!r} names node {node}, which does not exist")
            is_known = id(weights) in finite or bool(np.isfinite(weights).all())
            if weights.shape != problem.node_costs[node].shape or not is_known:
                raise ValueError(
                    f"memory row {row.name!r}: bytes of {_name(problem, node)} must be finite, one per label"
                )
            finite.add(id(weights))


def _check_ties(problem: Problem) -> None:
    sizes = [costs.size for costs in problem.node_costs]
    sources: dict[int, int] = {}
    for tie in problem.ties:
        if not (0 <= tie.source < len(sizes) and 0 <= tie.target < len(sizes)):
            raise ValueError(f"tie {tie.source} -> {tie.target} names a node outside 0 .. {len(sizes) - 1}")
        labels = tie.labels
        if labels.shape != (sizes[tie.source],) or ((labels < 0) | (labels >= sizes[tie.target])).any():
            raise ValueError(
                f"tie {_name(problem, tie.source)} -> {_name(problem, tie.target)} must give each of "
                f"{sizes[tie.source]} labels one of {sizes[tie.target]}"
            )
        if tie.target in sources:
            raise ValueError(f"{_name(problem, tie.target)} is tied twice: make the second tie an edge with FORBIDDEN")
        sources[tie.target] = tie.source
    for node in sources:
        source = sources[node]
        while source in sources and source != node:
            source = sources[source]
        if source == node:
            raise ValueError(f"{_name(problem, node)} is tied to itself along a chain of ties")


def _check_finite(values: Floats, known: set[int], owner: str) -> None:
    # Shared arrays are checked once. The problem holds them all while `known` lives, so ids are unique.
    if id(values) not in known and not np.isfinite(values).all():
        raise ValueError(f"{owner} has costs that are not finite: use FORBIDDEN ({FORBIDDEN:g} s) for what must not be")
    known.add(id(values))
