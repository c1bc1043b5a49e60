"""Dual ascent (TRW-S, Kolmogorov 2006): messages that raise a lower bound on a pairwise problem.

Any messages m_{u->v} (seconds, one number per label of v) give a reparametrisation with the same objective,
    theta_v  = c_v + sum_u m_{u->v},       theta_uv = R_uv - m_{v->u} (per row) - m_{u->v} (per column),
and so a bound and a bound per label (`LabelBounds`):
    LB      = sum_v min theta_v + sum_uv min theta_uv  <=  optimum,
    LB_v[i] = LB + (theta_v[i] - min theta_v) + sum_{uv at v} (min_j theta_uv[i, j] - min theta_uv).
A label with LB_v[i] above a known objective is in no better solution.

`DualAscent.sweep` visits the nodes in order (then backwards) and sends to the later (earlier) neighbours u
    m_{v->u}[j] = min_i (g_v theta_v[i] - m_{u->v}[i] + R_vu[i, j]),    g_v = 1 / max(#earlier, #later of v).
After a backward sweep every edge to an earlier node is owed the share g_v theta_v; `shared_messages` pays it
by lowering m_{u->v}. The bound is useless without that payment.

Nodes of one *rank* are not adjacent and are swept together; those with the same matrices share one numpy
call. Ranks come from `schedule_ranks` (equivalent to sweeping in node order) or `class_ranks` (all copies of
a repeated node at once: cheaper, slower to converge).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.planner.solver.arena import Arena
from autopar.planner.solver.labelling import Floats, Integers

CHUNK_ENTRIES = 2_000_000
FOLDED_ENTRIES = 8_192
"""Entries (nodes of a batch times those of a matrix) from which equal rows are folded. Measured: 60 x 60 of one node
takes 9 us either way, of 32 nodes 266 and 93 us."""
CLASS_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """A pairwise problem as arena tokens.

    Edges (u, v, R_uv) have u < v, are sorted, and no two are parallel.
    """

    arena: Arena
    costs: tuple[int, ...]
    edges: tuple[tuple[int, int, int], ...]

    def sizes(self) -> Integers:
        """Return the number of labels of every node."""
        return np.array([self.arena[token].size for token in self.costs], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelBounds:
    """`bound` on the optimum; with label k (the labels of all nodes in one row) it is `bound + slack[k]`."""

    bound: float
    slack: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """One edge of every node in a batch: costs (d, d_other), where its messages stand, the other nodes."""

    later: bool
    costs: Floats
    folded: _Folded | None
    incoming: Integers
    outgoing: Integers
    others: Integers

    def min_plus(self, rows: Floats) -> Floats:
        """Return out[b, j] = min_i rows[b, i] + costs[i, j]."""
        return _min_plus(rows, self.costs) if self.folded is None else self.folded.min_plus(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folded:
    """A matrix (d, d_other) as its distinct rows and columns: labels that differ on other edges only have equal ones.

    order: the rows, equal ones side by side; starts: where each distinct one begins; columns: (d_other,) which distinct
    column each is.
    """

    costs: Floats
    order: Integers
    starts: Integers
    columns: Integers

    @classmethod
    def of(cls, arena: Arena, matrix: int, transposed: bool) -> _Folded | None:
        """None where less than half of the entries are the same again."""
        distinct, rows, columns = (arena[token] for token in arena.derive("fold", _fold, matrix))
        if 2 * distinct.size > arena[matrix].size:
            return None
        if transposed:
            distinct, rows, columns = np.ascontiguousarray(distinct.T), columns, rows
        order = np.argsort(rows, kind="stable")
        starts = np.searchsorted(rows[order], np.arange(len(distinct)))
        return cls(costs=distinct, order=order, starts=starts, columns=columns)

    def min_plus(self, rows: Floats) -> Floats:
        """As of the whole matrix, to the last bit: a sum rounds no lower for the larger of two numbers."""
        least = np.minimum.reduceat(rows[:, self.order], self.starts, axis=1)
        return np.asarray(_min_plus(least, self.costs)[:, self.columns])


def _fold(matrix: Floats) -> tuple[Floats, Integers, Integers]:
    """The distinct rows and columns of a matrix, and which of them each row and each column is."""
    rows, columns = _classes(matrix), _classes(matrix.T)
    first = [np.unique(classes, return_index=True)[1] for classes in (rows, columns)]
    return np.ascontiguousarray(matrix[np.ix_(*first)]), rows, columns


def _classes(rows: Floats) -> Integers:
    """Equal rows get one number."""
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(row.tobytes(), len(seen)) for row in rows], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    nodes: Integers
    labels: Integers
    slots: tuple[_Slot, ...]
    share: float


class DualAscent:
    """Messages on a core, in one flat array: per edge (u, v) those into u, then those into v."""

    def __init__(self, core: Core, ranks: Sequence[int]) -> None:
        self.core = core
        self.sizes = core.sizes()
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self.node_costs = np.concatenate([core.arena[token] for token in core.costs])
        lengths = [int(self.sizes[u] + self.sizes[v]) for u, v, _ in core.edges]
        self.message_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.messages: Floats = np.zeros(int(self.message_starts[-1]))
        self._edge_groups = self._group_edges()
        self._receivers = self._message_receivers()
        self._batches = self._build_batches(ranks)

    def sweep(self, forward: bool) -> None:
        """Send messages to all later (forward) or all earlier nodes, in order."""
        messages = self.messages
        for batch in self._batches if forward else reversed(self._batches):
            totals = batch.share * self._totals(batch)
            for slot in batch.slots:
                if slot.later == forward:
                    lean = totals - messages[slot.incoming]
                    sent = slot.min_plus(lean)
                    messages[slot.outgoing] = sent - sent.min(axis=1, keepdims=True)

    def shared_messages(self) -> Floats:
        """Return messages for the bound after a backward sweep: each backward edge has received its share."""
        shared = self.messages.copy()
        for batch in self._batches:
            share = batch.share * self._totals(batch)
            for slot in batch.slots:
                if not slot.later:
                    shared[slot.incoming] -= share
        return shared

    def label_bounds(self, messages: Floats) -> LabelBounds:
        """Return the bound that these messages prove, and the slack of every label."""
        totals = self.node_costs + np.bincount(self._receivers, weights=messages, minlength=self.node_costs.size)
        smallest = np.minimum.reduceat(totals, self.starts[:-1])
        bound = float(smallest.sum())
        edge_slack = np.empty_like(messages)
        for costs, into_source, into_target in self._edge_groups:
            for some_source, some_target in _chunks(into_source, into_target):
                rest = costs - messages[some_source][:, :, None]
                rest -= messages[some_target][:, None, :]
                rows, columns = rest.min(axis=2), rest.min(axis=1)
                best = rows.min(axis=1, keepdims=True)
                bound += float(best.sum())
                edge_slack[some_source], edge_slack[some_target] = rows - best, columns - best
        slack = totals - np.repeat(smallest, self.sizes)
        slack += np.bincount(self._receivers, weights=edge_slack, minlength=slack.size)
        return LabelBounds(bound=bound, slack=slack)

    def round_backward_messages(self) -> Integers:
        """Return labels chosen in order: the best given earlier choices and the messages of later nodes."""
        chosen = np.zeros(self.sizes.size, dtype=np.int64)
        for batch in self._batches:
            totals = self.node_costs[batch.labels]
            for slot in batch.slots:
                totals = totals + (self.messages[slot.incoming] if slot.later else slot.costs.T[chosen[slot.others]])
            chosen[batch.nodes] = totals.argmin(axis=1)
        return chosen

    def improve(self, chosen: Integers, passes: int = 20) -> Integers:
        """Return `chosen` after moves of single nodes to a cheaper label (iterated conditional modes)."""
        chosen = chosen.copy()
        for _ in range(passes):
            before = chosen.copy()
            for batch in self._batches:
                totals = self.node_costs[batch.labels]
                for slot in batch.slots:
                    totals = totals + slot.costs.T[chosen[slot.others]]
                best, row = totals.argmin(axis=1), np.arange(len(batch.nodes))
                present = chosen[batch.nodes]
                # A tie keeps the present label, otherwise equal labels could swap for ever.
                chosen[batch.nodes] = np.where(totals[row, best] < totals[row, present], best, present)
            if (chosen == before).all():
                break
        return chosen

    def objective(self, chosen: Integers) -> float:
        """Return the cost of an assignment, seconds."""
        value = float(self.node_costs[self.starts[:-1] + chosen].sum())
        arena = self.core.arena
        return value + sum(float(arena[matrix][chosen[u], chosen[v]]) for u, v, matrix in self.core.edges)

    def _totals(self, batch: _Batch) -> Floats:
        totals = self.node_costs[batch.labels]
        for slot in batch.slots:
            totals = totals + self.messages[slot.incoming]
        return totals

    def _into(self, edge: int, target: bool) -> Integers:
        """Return where the messages into one end of `edge` stand."""
        u, v, _ = self.core.edges[edge]
        start = int(self.message_starts[edge]) + (int(self.sizes[u]) if target else 0)
        return np.arange(start, start + int(self.sizes[v if target else u]))

    def _message_receivers(self) -> Integers:
        parts = [np.zeros(0, dtype=np.int64)]
        for u, v, _ in self.core.edges:
            parts += [
                np.arange(self.starts[u], self.starts[u + 1]),
                np.arange(self.starts[v], self.starts[v + 1]),
            ]
        return np.concatenate(parts)

    def _group_edges(self) -> list[tuple[Floats, Integers, Integers]]:
        groups: dict[int, list[int]] = defaultdict(list)
        for edge, (_, _, matrix) in enumerate(self.core.edges):
            groups[matrix].append(edge)
        return [
            (
                self.core.arena[matrix],
                np.stack([self._into(edge, False) for edge in edges]),
                np.stack([self._into(edge, True) for edge in edges]),
            )
            for matrix, edges in groups.items()
        ]

    def _build_batches(self, ranks: Sequence[int]) -> list[_Batch]:
        """Group the nodes of one rank that have the same matrices in the same directions."""
        ends: list[list[tuple[bool, int, bool, int, int]]] = [[] for _ in self.core.costs]
        for edge, (u, v, matrix) in enumerate(self.core.edges):
            ends[u].append((ranks[v] > ranks[u], matrix, False, edge, v))
            ends[v].append((ranks[u] > ranks[v], matrix, True, edge, u))
        groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for node in sorted(range(len(ends)), key=lambda node: (ranks[node], node)):
            ends[node].sort()
            groups[(ranks[node], int(self.sizes[node]), tuple(end[:3] for end in ends[node]))].append(node)
        return [self._batch(nodes, ends) for nodes in groups.values()]

    def _batch(self, nodes: list[int], ends: list[list[tuple[bool, int, bool, int, int]]]) -> _Batch:
        slots = []
        for number, (later, matrix, is_target, _, _) in enumerate(ends[nodes[0]]):
            edges = [ends[node][number][3] for node in nodes]
            costs = self.core.arena[matrix]
            is_large = len(nodes) * costs.size >= FOLDED_ENTRIES
            slots.append(
                _Slot(
                    later=later,
                    costs=np.ascontiguousarray(costs.T) if is_target else costs,
                    folded=_Folded.of(self.core.arena, matrix, is_target) if is_large else None,
                    incoming=np.stack([self._into(edge, is_target) for edge in edges]),
                    outgoing=np.stack([self._into(edge, not is_target) for edge in edges]),
                    others=np.array([ends[node][number][4] for node in nodes], dtype=np.int64),
                )
            )
        num_later = sum(slot.later for slot in slots)
        labels = np.stack([np.arange(self.starts[node], self.starts[node + 1]) for node in nodes])
        share = 1.0 / max(num_later, len(slots) - num_later, 1)
        return _Batch(nodes=np.array(nodes, dtype=np.int64), labels=labels, slots=tuple(slots), share=share)


def schedule_ranks(core: Core) -> list[int]:
    """Return ranks under which a batched sweep does exactly what a sweep in node order does."""
    ranks = [0] * len(core.costs)
    for u, v, _ in sorted(core.edges, key=lambda edge: edge[1]):
        ranks[v] = max(ranks[v], ranks[u] + 1)
    return ranks


def class_ranks(core: Core) -> list[int]:
    """Return ranks that sweep nodes with equal surroundings (`CLASS_ROUNDS` steps far) together."""
    classes = equal_surroundings(core)
    earlier: list[list[int]] = [[] for _ in core.costs]
    for u, v, _ in core.edges:
        earlier[v].append(u)
    colours = [0] * len(classes)
    for node, kind in enumerate(classes):
        taken = {colours[other] for other in earlier[node] if classes[other] == kind}
        colours[node] = next(colour for colour in range(len(taken) + 1) if colour not in taken)
    first = {kind: node for node, kind in reversed(list(enumerate(classes)))}
    keys = [(first[kind], colour) for kind, colour in zip(classes, colours, strict=True)]
    rank = {key: number for number, key in enumerate(sorted(set(keys)))}
    return [rank[key] for key in keys]


def equal_surroundings(core: Core) -> list[int]:
    """Colour refinement: nodes get one class when costs, matrices and classes of their neighbours agree."""
    around: list[list[tuple[int, bool, int]]] = [[] for _ in core.costs]
    for u, v, matrix in core.edges:
        around[u].append((matrix, False, v))
        around[v].append((matrix, True, u))
    classes = list(core.costs)
    for _ in range(CLASS_ROUNDS):
        seen: dict[tuple[object, ...], int] = {}
        classes = [
            seen.setdefault(
                (classes[node], tuple(sorted((matrix, end, classes[other]) for matrix, end, other in ends))),
                len(seen),
            )
            for node, ends in enumerate(around)
        ]
    return classes


def _min_plus(rows: Floats, costs: Floats) -> Floats:
    """Return out[b, j] = min_i rows[b, i] + costs[i, j]."""
    step = max(1, CHUNK_ENTRIES // costs.size)
    if len(rows) <= step:
        return np.asarray((rows[:, :, None] + costs).min(axis=1))
    return np.concatenate([(rows[i : i + step, :, None] + costs).min(axis=1) for i in range(0, len(rows), step)])


def _chunks(first: Integers, second: Integers) -> list[tuple[Integers, Integers]]:
    step = max(1, CHUNK_ENTRIES // (first.shape[1] * second.shape[1]))
    return [(first[i : i + step], second[i : i + step]) for i in range(0, len(first), step)]
