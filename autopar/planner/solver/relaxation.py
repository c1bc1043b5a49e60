"""The bound under budgets: one dual ascent over messages and multipliers together.

For every lam >= 0 (seconds per byte) and all messages m, with theta of `dual_ascent.py`,
    LB(lam, m) = sum_v min (theta_v + lam.w_v) + sum_uv min theta_uv - lam.budget  <=  optimum in the budgets.
Pricing changes node costs only. So one core serves all multipliers, the messages of the last ones are a warm
start for the next, and a look at new multipliers costs `SWEEPS` sweeps (`Relaxation.look`), not a solve.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.planner.solver.deadline import Deadline
from autopar.planner.solver.exact import core_of, start_ascent
from autopar.planner.solver.problem import Floats, Integers
from autopar.planner.solver.reductions import Graph, back_substitute

ROUNDING_PASSES = 4
"""Single moves after a rounding; the mixtures of roundings do the rest, and better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one visit of `multipliers` found: bound (seconds), messages that prove it, slack per label, assignments."""

    multipliers: Floats
    bound: float
    messages: Floats
    slack: Floats
    assignments: list[Integers]


class Relaxation:
    """The dual of a graph with weights; the graph must have nodes left and stays as it is."""

    def __init__(self, graph: Graph, budgets: Floats) -> None:
        self.graph = graph
        core, self.nodes = core_of(graph)
        self.ascent = start_ascent(core)
        self.unpriced = self.ascent.node_costs
        weights = graph.weights or []
        self.weights = np.concatenate([graph.arena[weights[node]] for node in self.nodes], axis=1)
        self.budgets = budgets - graph.weight_constant

    def look(self, multipliers: Floats, sweeps: int, deadline: Deadline) -> Look:
        """Ascend at these multipliers, and round half-way and at the end."""
        ascent = self.ascent
        ascent.node_costs = self.unpriced + multipliers @ self.weights
        assignments = []
        for count in range(1, sweeps + 1):
            ascent.sweep(True)
            ascent.sweep(False)
            if count in (sweeps // 2, sweeps):
                rounded = ascent.improve(ascent.round_backward_messages(), passes=ROUNDING_PASSES)
                assignments.append(self.original(rounded))
            if deadline.left() <= 0.0:
                break
        messages = ascent.shared_messages()
        bounds = ascent.label_bounds(messages)
        constant = self.graph.constant - float(multipliers @ self.budgets)
        return Look(
            multipliers=multipliers,
            bound=bounds.bound + constant,
            messages=messages,
            slack=bounds.slack,
            assignments=assignments,
        )

    def original(self, chosen: Integers) -> Integers:
        """Return original labels of all nodes for label positions of the core."""
        domains = self.graph.domains
        return back_substitute(
            self.graph,
            {node: int(domains[node][label]) for node, label in zip(self.nodes, chosen.tolist(), strict=True)},
        )

    def positions(self, labels: Integers) -> Integers | None:
        """Inverse of `original`; None when a label is gone from the core."""
        domains = self.graph.domains
        found = np.array([int(np.searchsorted(domains[node], labels[node])) for node in self.nodes])
        there = all(
            position < len(domains[node]) and domains[node][position] == labels[node]
            for node, position in zip(self.nodes, found.tolist(), strict=True)
        )
        return found if there else None
