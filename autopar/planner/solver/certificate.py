"""An independent check of a solution: replay the proof log on the original arrays and recompute the bound.

The replay keeps one table per set of nodes (at first: node costs plus multipliers times bytes, and merged
edge costs), after the arrays of tied nodes were written over the labels of their sources (`_untied`). It follows
the steps; each is verified, none is believed:

- dominate: every removed label b has a kept label a with
      sum over tables T at v of  max (T[a, ...] - T[b, ...])  <=  0             (`_Replay.dominate`);
- eliminate: the tables at v are joined and minimised over v (`_Replay.eliminate`); any order is exact;
- fix: the messages give LB = sum_v min theta_v + sum_uv min theta_uv, and LB plus the slack of each removed
  label is at least the cutoff (`_Replay.fix`). Solutions with removed labels then cost at least the cutoff.

The bound is the constant left over plus the LB of the final messages, or the smallest cutoff if that is
lower, less whatever rounding the steps were forgiven; minus sum_k multiplier_k (budget_k - constant_k) when
there are memory rows (weak duality: for multipliers >= 0 the Lagrangian bounds every assignment within the
budgets).

The checker shares the hash-consing of `arena.py` with the solver, and no mathematics. What it does not
prove: `lower_bound` above `proven_bound` in a certificate of kind "solver" rests on HiGHS. That a problem
is INFEASIBLE is not certified either (the assignment and its bytes are checked, their minimality is not).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from autopar.planner.solver.arena import Arena
from autopar.planner.solver.labelling import Edge, Floats, Integers, Problem, evaluate
from autopar.planner.solver.solution import (
    Certificate,
    Dominate,
    Eliminate,
    Fix,
    Solution,
    Status,
    relative_gap,
)

RELATIVE_TOLERANCE = 1e-9
"""Rounding allowed between the solver's sums and ours, relative to the objective."""
CLAIMED_BY_ROUNDING = 1e-6
"""Rounding of long proofs with priced bytes, relative to the objective: seen were 3e-9 (126 layers)."""

Scope = tuple[int, ...]


class CertificateError(ValueError):
    """The solution claims something that its certificate does not prove."""


def check_certificate(problem: Problem, solution: Solution) -> None:
    """Raise CertificateError when objective, memory, gap or lower bound do not hold for `problem`."""
    _check_claims(problem, solution, RELATIVE_TOLERANCE)


def certified(problem: Problem, solution: Solution) -> Solution:
    """Return the solution with the bound that its certificate proves.

    Where the solver's sums claim more by rounding, up to CLAIMED_BY_ROUNDING of the objective, the bound is lowered to
    what is proven. Raises CertificateError as `check_certificate` does.
    """
    proven = _check_claims(problem, solution, CLAIMED_BY_ROUNDING)
    claimed = solution.certificate.proven_bound
    if claimed <= proven or solution.certificate.kind == "solver":
        return solution
    bound = min(solution.lower_bound, proven)
    return replace(
        solution,
        lower_bound=bound,
        gap=relative_gap(solution.objective, bound),
        certificate=replace(solution.certificate, proven_bound=proven),
    )


def _check_claims(problem: Problem, solution: Solution, slack: float) -> float:
    """Return the bound that the proof log gives."""
    _check_assignment(problem, solution)
    proven = replay(problem, solution.certificate)
    tolerance = slack * abs(solution.objective) + 1e-12 * min(solution.certificate.ceiling, 1.0)
    if not solution.certificate.proven_bound <= proven + tolerance:
        raise CertificateError(
            f"the proof log gives {proven!r} s, the certificate says {solution.certificate.proven_bound!r} s"
        )
    limit = solution.objective if solution.certificate.kind == "solver" else solution.certificate.proven_bound
    if solution.status is not Status.INFEASIBLE and not solution.lower_bound <= limit + tolerance:
        raise CertificateError(f"lower bound {solution.lower_bound!r} s, but at most {limit!r} s is proven")
    return proven


def replay(problem: Problem, certificate: Certificate) -> float:
    """Return the lower bound in seconds that the certificate proves for `problem`."""
    if len(certificate.multipliers) not in (0, len(problem.memory_rows)):
        raise CertificateError(f"{len(certificate.multipliers)} multipliers for {len(problem.memory_rows)} memory rows")
    if any(not multiplier >= 0.0 for multiplier in certificate.multipliers):
        raise CertificateError("a multiplier is negative")
    problem = _untied(problem)
    state = _Replay(problem, certificate)
    for step in certificate.steps:
        match step:
            case Dominate():
                state.dominate(step.node, step.kept)
            case Eliminate():
                state.eliminate(step.node)
            case Fix():
                state.fix(step)
    bound = min(state.bound(certificate.messages)[0], state.cutoff) - state.forgiven
    for multiplier, row in zip(certificate.multipliers, problem.memory_rows, strict=False):
        bound -= multiplier * (row.budget_bytes - row.constant_bytes)
    return bound


def _check_assignment(problem: Problem, solution: Solution) -> None:
    labels = solution.assignment
    sizes = np.array([costs.size for costs in problem.node_costs], dtype=np.int64)
    if labels.shape != sizes.shape or ((labels < 0) | (labels >= sizes)).any():
        raise CertificateError(f"the assignment does not give each of {len(sizes)} nodes one of its labels")
    for tie in problem.ties:
        if labels[tie.target] != tie.labels[labels[tie.source]]:
            raise CertificateError(f"the assignment breaks the tie {tie.source} -> {tie.target}")
    objective, used = evaluate(problem, labels)
    if not np.isclose(objective, solution.objective, rtol=RELATIVE_TOLERANCE, atol=0.0):
        raise CertificateError(f"the assignment costs {objective!r} s, the solution says {solution.objective!r} s")
    if not np.isclose(relative_gap(objective, solution.lower_bound), solution.gap, rtol=1e-6, atol=2e-9):
        raise CertificateError(f"the gap is {relative_gap(objective, solution.lower_bound)!r}, not {solution.gap!r}")
    if solution.status in (Status.OPTIMAL, Status.GAP):
        for row, total in zip(problem.memory_rows, used, strict=True):
            if total > row.budget_bytes * (1.0 + RELATIVE_TOLERANCE):
                raise CertificateError(f"memory row {row.name!r} uses {total:.0f} bytes of {row.budget_bytes:.0f}")


def _untied(problem: Problem) -> Problem:
    """Return `problem` with tied nodes left with one free label, the last of every chain of ties first."""
    costs, edges = list(problem.node_costs), list(problem.edges)
    weights = [dict(row.bytes) for row in problem.memory_rows]
    waiting = {tie.target: tie for tie in problem.ties}
    while waiting:
        for node in sorted(waiting.keys() - {tie.source for tie in waiting.values()}):
            tie = waiting.pop(node)
            costs[tie.source] = costs[tie.source] + costs[node][tie.labels]
            costs[node] = np.zeros(1)
            for row in weights:
                if node in row:
                    row[tie.source] = row.get(tie.source, np.zeros(tie.labels.size)) + row.pop(node)[tie.labels]
            for number, edge in enumerate(edges):
                if edge.source == node:
                    edge = Edge(source=tie.source, target=edge.target, costs=edge.costs[tie.labels])
                if edge.target == node:
                    edge = Edge(source=edge.source, target=tie.source, costs=edge.costs[:, tie.labels])
                edges[number] = edge
    rows = tuple(replace(row, bytes=values) for row, values in zip(problem.memory_rows, weights, strict=True))
    return replace(problem, node_costs=tuple(costs), edges=tuple(edges), memory_rows=rows, ties=())


class _Replay:
    """The problem while steps are applied: tables by scope (ascending nodes), labels left, the constant."""

    def __init__(self, problem: Problem, certificate: Certificate) -> None:
        self.arena = Arena()
        self.ceiling = certificate.ceiling
        self.domains: list[Integers] = [np.arange(costs.size) for costs in problem.node_costs]
        self.tables: dict[Scope, int] = {}
        self.touching: defaultdict[int, set[Scope]] = defaultdict(set)
        self.constant, self.forgiven, self.cutoff = 0.0, 0.0, np.inf
        for node, costs in enumerate(problem.node_costs):
            total = np.minimum(costs, self.ceiling)
            for multiplier, row in zip(certificate.multipliers, problem.memory_rows, strict=False):
                if node in row.bytes:
                    total = total + multiplier * row.bytes[node]
            self._add((node,), self.arena.token(total))
        for edge in problem.edges:
            self._add_edge(edge.source, edge.target, self.arena.token(edge.costs))

    def _add_edge(self, source: int, target: int, costs: int) -> None:
        (cut,) = self.arena.derive("cut", lambda values: (np.minimum(values, self.ceiling),), costs)
        if source == target:
            self._add((source,), self.arena.derive("loop", lambda values: (values.diagonal().copy(),), cut)[0])
        elif source < target:
            self._add((source, target), cut)
        else:
            self._add((target, source), self.arena.derive("flip", lambda values: (values.T.copy(),), cut)[0])

    def _add(self, scope: Scope, table: int) -> None:
        if not scope:
            self.constant += float(self.arena[table])
            return
        present = self.tables.get(scope)
        if present is not None:
            (table,) = self.arena.derive("sum", lambda first, second: (first + second,), present, table)
        self.tables[scope] = table
        for node in scope:
            self.touching[node].add(scope)

    def _drop(self, scope: Scope) -> int:
        for node in scope:
            self.touching[node].discard(scope)
        return self.tables.pop(scope)

    def _positions(self, node: int, kept: Integers) -> Integers:
        positions = np.flatnonzero(np.isin(self.domains[node], kept))
        if len(positions) != len(kept) or not len(kept):
            raise CertificateError(f"a step keeps labels of node {node} that are not there")
        return positions

    def _restrict(self, node: int, positions: Integers) -> None:
        key = positions.tobytes()
        self.domains[node] = self.domains[node][positions]
        for scope in self.touching[node]:
            axis = scope.index(node)
            (self.tables[scope],) = self.arena.derive(
                "restrict",
                lambda values, axis=axis: (values.take(positions, axis),),
                self.tables[scope],
                key=(axis, key),
            )

    def dominate(self, node: int, kept: Integers) -> None:
        """Verify that each removed label is dominated by a kept one, and remove it."""
        positions = self._positions(node, kept)
        scopes = sorted(self.touching[node], key=lambda scope: (self.tables[scope], scope.index(node)))
        axes = tuple(scope.index(node) for scope in scopes)

        def excess(*tables: Floats) -> tuple[Floats]:
            removed = np.setdiff1d(np.arange(len(self.domains[node])), positions)
            worst = np.zeros((len(positions), len(removed)))
            for axis, table in zip(axes, tables, strict=True):
                flat = np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1)
                for row, label in enumerate(positions):
                    worst[row] += (flat[label] - flat[removed]).max(axis=1)
            return (np.asarray(worst.min(axis=0).max(initial=0.0)),)

        tokens = (self.tables[scope] for scope in scopes)
        (result,) = self.arena.derive("excess", excess, *tokens, key=(axes, positions.tobytes()))
        self.forgiven += float(self.arena[result])
        self._restrict(node, positions)

    def eliminate(self, node: int) -> None:
        """Minimise `node` out of its tables."""
        scopes = sorted(self.touching[node], key=lambda scope: (len(scope), scope))
        if len(self.domains[node]) == 1:
            for scope in scopes:
                axis = scope.index(node)
                (rest,) = self.arena.derive(
                    "only", lambda values, axis=axis: (values.take(0, axis),), self._drop(scope), key=axis
                )
                self._add(tuple(other for other in scope if other != node), rest)
            return
        joint = tuple(sorted({other for scope in scopes for other in scope}))
        shapes = tuple(tuple(len(self.domains[o]) if o in scope else 1 for o in joint) for scope in scopes)
        axis = joint.index(node)

        def minimise(*tables: Floats) -> tuple[Floats]:
            # Scopes and `joint` ascend alike, so widening a table needs no transposition.
            total = sum(table.reshape(shape) for table, shape in zip(tables, shapes, strict=True))
            return (np.asarray(total).min(axis=axis),)

        tokens = [self._drop(scope) for scope in scopes]
        (result,) = self.arena.derive("minimise", minimise, *tokens, key=(shapes, axis))
        self._add(tuple(other for other in joint if other != node), result)

    def bound(self, messages: Floats) -> tuple[float, dict[int, Floats]]:
        """Return the bound of these messages on what is left, and the slack of every label of every node."""
        totals = {scope[0]: self.arena[table].copy() for scope, table in self.tables.items() if len(scope) == 1}
        pairs = sorted(scope for scope in self.tables if len(scope) > 1)
        if any(len(scope) > 2 for scope in pairs):
            raise CertificateError("messages bound a pairwise problem, but the steps before them left a larger table")
        slack = {node: np.zeros_like(costs) for node, costs in totals.items()}
        bound, start = self.constant, 0
        for u, v in pairs:
            middle, end = start + len(self.domains[u]), start + len(self.domains[u]) + len(self.domains[v])
            into_u, into_v, start = messages[start:middle], messages[middle:end], end
            if end > messages.size:
                raise CertificateError(f"{messages.size} messages do not reach edge {u} -> {v}")
            rest = self.arena[self.tables[u, v]] - into_u[:, None] - into_v
            best = float(rest.min())
            bound += best
            slack[u] += rest.min(axis=1) - best
            slack[v] += rest.min(axis=0) - best
            totals[u] += into_u
            totals[v] += into_v
        if start != messages.size:
            raise CertificateError(f"{messages.size} messages for edges that take {start}")
        for node, costs in totals.items():
            bound += float(costs.min())
            slack[node] += costs - costs.min()
        return bound, slack

    def fix(self, step: Fix) -> None:
        """Verify that each removed label costs at least the cutoff, and remove it."""
        bound, slack = self.bound(step.messages)
        self.cutoff = min(self.cutoff, step.cutoff)
        for node, kept in step.kept.items():
            positions = self._positions(node, kept)
            removed = np.delete(slack[node], positions)
            self.forgiven += max(0.0, float((step.cutoff - bound - removed).max(initial=0.0)))
            self._restrict(node, positions)
