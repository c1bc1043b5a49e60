"""Ties: "the label of v is labels[label of u]", merged exactly before solving and undone afterwards.

    merged problem:  c_u[i] += c_v[labels[i]],   R_uw[i, j] += R_vw[labels[i], j],   bytes_u[i] += bytes_v[labels[i]]

A tied node keeps its number, with one label that costs nothing and no edges, so assignments and certificates of the
merged problem speak of the same nodes. Chains of ties are composed (`_roots`). The certificate checker merges with its
own code.

    ties=(Tie(source=0, target=2, labels=np.array([1, 0])),)      # node 2 takes label 1 where node 0 takes 0
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from autopar.planner.solver.labelling import Edge, Floats, Integers, MemoryRow, Problem, evaluate
from autopar.planner.solver.solution import Solution, relative_gap


def merge_ties(problem: Problem) -> Problem:
    """Return the problem without ties that has the same optimum."""
    roots, maps = _roots(problem)
    taken: dict[tuple[int, bytes, bytes], Floats] = {}

    def along(edge: Edge) -> Edge:
        rows, columns = maps[edge.source], maps[edge.target]
        ends = roots[edge.source], roots[edge.target]
        if ends == (edge.source, edge.target):
            return edge
        # Equal ties of a shared array give one shared array again.
        key = (id(edge.costs), rows.tobytes(), columns.tobytes())
        costs = taken.setdefault(key, edge.costs[np.ix_(rows, columns)])
        return Edge(source=ends[0], target=ends[1], costs=costs)

    return replace(
        problem,
        node_costs=tuple(_merge_nodes(dict(enumerate(problem.node_costs)), roots, maps, fill=True).values()),
        edges=tuple(along(edge) for edge in problem.edges),
        memory_rows=tuple(_merge_row(row, roots, maps) for row in problem.memory_rows),
        ties=(),
    )


def merge_labels(problem: Problem, labels: Integers) -> Integers:
    """Return the assignment of the merged problem that agrees with `labels` on every node that is not tied."""
    merged = labels.copy()
    merged[[tie.target for tie in problem.ties]] = 0
    return merged


def spread_solution(problem: Problem, solution: Solution) -> Solution:
    """Return the solution of `problem` from that of its merged problem; objective and gap from the original arrays."""
    roots, maps = _roots(problem)
    labels = solution.assignment
    spread = np.array([maps[node][labels[root]] for node, root in enumerate(roots)], dtype=np.int64)
    objective, _ = evaluate(problem, spread)
    bound = min(solution.lower_bound, objective)
    certificate = replace(solution.certificate, proven_bound=min(solution.certificate.proven_bound, objective))
    return replace(
        solution,
        assignment=spread,
        objective=objective,
        lower_bound=bound,
        gap=relative_gap(objective, bound),
        certificate=certificate,
    )


def _roots(problem: Problem) -> tuple[list[int], list[Integers]]:
    """Return for every node the untied node that decides it, and its label for every label of that node."""
    ties = {tie.target: tie for tie in problem.ties}
    roots = list(range(len(problem.node_costs)))
    maps: list[Integers] = [np.arange(costs.size) for costs in problem.node_costs]
    for node in ties:
        root, labels = node, maps[node]
        while root in ties:
            labels = labels[ties[root].labels]
            root = ties[root].source
        roots[node], maps[node] = root, labels
    return roots, maps


def _merge_nodes(values: dict[int, Floats], roots: list[int], maps: list[Integers], *, fill: bool) -> dict[int, Floats]:
    """Return per-label values added up at the roots; tied nodes get one zero (`fill`) or nothing."""
    merged: dict[int, Floats] = {node: costs for node, costs in values.items() if roots[node] == node}
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for node in sorted(values):
        if roots[node] != node:
            groups[roots[node]].append(node)
    for root, members in groups.items():
        total = sum((values[node][maps[node]] for node in members), merged.get(root, np.zeros(maps[root].size)))
        merged[root] = np.asarray(total)
    if fill:
        merged.update({node: np.zeros(1) for node in values if roots[node] != node})
    return dict(sorted(merged.items()))


def _merge_row(row: MemoryRow, roots: list[int], maps: list[Integers]) -> MemoryRow:
    return replace(row, bytes=_merge_nodes(dict(row.bytes), roots, maps, fill=False))
