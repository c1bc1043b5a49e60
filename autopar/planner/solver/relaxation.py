"""The bound under budgets: one dual ascent over messages and multipliers together.

For every lam >= 0 (seconds per byte) and all messages m, with theta of `dual_ascent.py`,
    LB(lam, m) = sum_v min (theta_v + lam.w_v) + sum_uv min theta_uv - lam.budget  <=  optimum in the budgets.
Pricing changes node costs only. So one core serves all multipliers, the messages of the last ones are a warm
start for the next, and a look at new multipliers costs `SWEEPS` sweeps (`Relaxation.look`), not a solve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.planner.solver.deadline import Deadline
from autopar.planner.solver.dual_ascent import Core, LabelBounds
from autopar.planner.solver.exact import core_of, start_ascent
from autopar.planner.solver.label_bytes import LabelBytes
from autopar.planner.solver.labelling import Floats, Integers
from autopar.planner.solver.lifting import FEWEST_NODES, Lifting, ranges
from autopar.planner.solver.reductions import Graph, back_substitute
from autopar.planner.solver.repeats import Short, shorten

ROUNDING_PASSES = 4
"""Single moves after a rounding; the mixtures of roundings do the rest, and better."""

LIFTED_SWEEPS, LIFTED_LOOKS, LIFTED_GAP = 2, 10, 1e-4
"""Sweeps of the deep core between two roundings; before, those of the short copy end at this gap or number of looks."""
MET = 1e-5
"""Relative difference at which a bound meets an assignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one visit of `multipliers` found: bound (seconds), messages that prove it, slack per label, assignments."""

    multipliers: Floats
    bound: float
    messages: Floats
    slack: Floats
    assignments: list[Integers]
    is_met: bool
    """Whether an assignment is as cheap, at these multipliers, as the bound says that none is cheaper."""


class Relaxation:
    """The dual of a graph with weights; the graph must have nodes left and stays as it is.

    Where layers repeat, with equal costs and equal bytes, a short copy is swept at every price (`lifting.py`).
    """

    def __init__(self, graph: Graph, budgets: Floats) -> None:
        self.graph = graph
        core, self.nodes = core_of(graph)
        self.bytes = LabelBytes(graph, self.nodes)
        self.budgets = budgets - graph.weight_constant
        self.lifting = _lifting(graph, core, self.nodes, self.bytes)
        self.ascent = start_ascent(core) if self.lifting is None else self.lifting.ascent.deep
        self.unpriced = self.ascent.node_costs

    def look(self, multipliers: Floats, sweeps: int, deadline: Deadline) -> Look:
        """Ascend at these multipliers until the bound meets a rounding, or for so many sweeps."""
        ascent = self.ascent
        prices = self.bytes.prices(multipliers)
        ascent.node_costs = self.unpriced + self.bytes.seconds(prices)
        rounded = [] if self.lifting is None else [self.lifting.look(prices, deadline)]
        messages, bounds = ascent.messages, LabelBounds(bound=-np.inf, slack=np.zeros(0))
        pairs = sweeps // 2 if self.lifting is None else LIFTED_SWEEPS
        for count in range(1, sweeps + 1):
            ascent.sweep(True)
            ascent.sweep(False)
            is_last = count == sweeps or deadline.left() <= 0.0
            if count % pairs and not is_last:
                continue
            rounded.append(ascent.improve(ascent.round_backward_messages(), passes=ROUNDING_PASSES))
            messages = ascent.shared_messages()
            bounds = ascent.label_bounds(messages)
            least = min(map(ascent.objective, rounded[-2:]))
            if is_last or least - bounds.bound <= MET * abs(least):
                break
        constant = self.graph.constant - float(multipliers @ self.budgets)
        return Look(
            multipliers=multipliers,
            bound=bounds.bound + constant,
            messages=messages,
            slack=bounds.slack,
            assignments=[self.original(labels) for labels in rounded],
            is_met=least - bounds.bound <= MET * abs(least),
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


class _PricedLifting:
    """A short copy whose labels cost bytes, too: at the mean price of the layers for which it stands."""

    def __init__(self, graph: Graph, core: Core, short: Short, nodes: Sequence[int], deep: LabelBytes) -> None:
        arena = core.arena
        costs = tuple(arena.derive("first row", lambda values: (values[0],), token)[0] for token in short.core.costs)
        self.ascent = Lifting(core, replace(short, core=replace(short.core, costs=costs)))
        self.unpriced = self.ascent.shallow.node_costs
        first = np.full(len(costs), -1, dtype=np.int64)
        places = np.flatnonzero(short.nodes >= 0)
        first[short.nodes[places][::-1]] = places[::-1]
        self.bytes = LabelBytes(graph, [nodes[place] for place in first.tolist()])
        lengths = deep.num_kinds[places]
        self._from = ranges(deep.first_kind[places], lengths)
        self._to = ranges(self.bytes.first_kind[short.nodes[places]], lengths)
        self._shares = 1.0 / np.maximum(np.bincount(self._to, minlength=int(self.bytes.num_kinds.sum())), 1)

    def look(self, prices: Floats, deadline: Deadline) -> Integers:
        """Give the deep core messages for these prices of its bytes; return positions for it."""
        mean = np.bincount(self._to, weights=prices[self._from], minlength=len(self._shares)) * self._shares
        self.ascent.shallow.node_costs = self.unpriced + self.bytes.seconds(mean)
        labels, _ = self.ascent.converge(LIFTED_GAP, deadline, most_looks=LIFTED_LOOKS)
        self.ascent.repeat(self.ascent.shallow.messages)
        return labels


def _lifting(graph: Graph, core: Core, nodes: Sequence[int], deep: LabelBytes) -> _PricedLifting | None:
    """Layers repeat where costs and bytes do: both are compared as one array."""
    if len(core.costs) < FEWEST_NODES:
        return None
    arena, weights = core.arena, graph.weights or []
    joined = tuple(
        arena.derive("join", lambda costs, rows: (np.concatenate([costs[None, :], rows]),), token, weights[node])[0]
        for token, node in zip(core.costs, nodes, strict=True)
    )
    short = shorten(replace(core, costs=joined))
    return None if short is None else _PricedLifting(graph, core, short, nodes, deep)
