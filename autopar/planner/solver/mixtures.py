"""Mixtures: exact optima over the labels that good assignments use.

Roundings of one ascent are each bad somewhere else. Restricted to the labels that a few of them use, a problem
is small enough for bucket elimination, at any multipliers, in a fraction of a sweep (`Mixtures.at`). Moving
the multipliers between "too many bytes" and "fits" by bisection gives the best supported mixture that fits
(`Mixtures.fitting`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.planner.solver.assignments import Plans
from autopar.planner.solver.bucket_elimination import eliminate_all, elimination_order
from autopar.planner.solver.labelling import Floats, Integers
from autopar.planner.solver.reductions import Graph, back_substitute, simplify

PEAK_ENTRIES, TOTAL_ENTRIES = 1_000_000, 30_000_000
BISECTIONS = 8
REACH = 4.0
"""Bisection starts between the multipliers divided and multiplied by this."""


def restricted(graph: Graph, assignments: Sequence[Integers]) -> Graph:
    """Return a copy of `graph` that keeps the labels which some assignment uses, where any survive in it."""
    trial, seen = graph.copy(), np.stack(assignments)
    for node in trial.nodes():
        kept = np.flatnonzero(np.isin(trial.domains[node], seen[:, node]))
        if 0 < len(kept) < trial.size(node):
            trial.restrict(node, kept)
    simplify(trial)
    return trial


def priced(graph: Graph, multipliers: Floats) -> Graph:
    """Return a copy of `graph` in which bytes cost `multipliers`; its arena may be thrown away."""
    copy = graph.copy()
    copy.arena = graph.arena.fork()
    if graph.weights is None:
        raise AssertionError("a graph with budgets has weights")
    for node in graph.nodes():
        prices = graph.prices_of(node, multipliers)
        (copy.costs[node],) = copy.arena.derive(
            "price",
            lambda costs, weights, prices=prices: (costs + prices @ weights,),
            graph.costs[node],
            graph.weights[node],
            key=prices.tobytes(),
        )
    copy.constant += float(multipliers @ graph.weight_constant)
    copy.weights = None
    return copy


class Mixtures:
    """The labels of some assignments on a graph with weights."""

    def __init__(self, graph: Graph, assignments: Sequence[Integers]) -> None:
        self.graph = restricted(graph, assignments)

    def at(self, multipliers: Floats) -> Integers | None:
        """Return the best mixture at these multipliers; None if the labels are too entangled for tables."""
        trial = priced(self.graph, multipliers)
        simplify(trial)
        if trial.nodes():
            order = elimination_order(trial, PEAK_ENTRIES, TOTAL_ENTRIES)
            if order is None:
                return None
            eliminate_all(trial, order)
        return back_substitute(trial, {})

    def fitting(self, plans: Plans, multipliers: Floats) -> None:
        """Let `plans` take the mixtures met while the multipliers are bisected between over budget and within."""
        low, high = 1.0 / REACH, REACH
        for _ in range(BISECTIONS):
            factor = float(np.sqrt(low * high))
            labels = self.at(factor * multipliers)
            if labels is None:
                return
            if plans.fits(plans.take(labels).usage):
                high = factor
            else:
                low = factor
