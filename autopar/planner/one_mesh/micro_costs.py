"""Micro-costs: the problem of one part of the batch -> the problem of the step that runs it several times.

    built = in_micro_batches(built, 4, prices)        gathers and operators 4 times; the optimizer once

    a sum of a gradient over ranks that leaves it as large      once, behind the last part
    a sum that makes a gradient smaller                         4 times, and once where parameters are gathered once
    gathers and casts of parameters                             likewise

as the lowering does it (`passes/stages/late_sums.py`, `once_per_step.py`). A part is priced at its own shapes, so
launch latencies and small collectives show. Costs never fall with the number of parts, so more than one is tried only
where memory binds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from autopar.layouts.placement import Layout, Partial, Replicate
from autopar.planner.one_mesh.hidden_communication import gather_seconds
from autopar.planner.problem.build import Built, Variable
from autopar.planner.problem.factorisation import shape_of
from autopar.planner.problem.prices import Floats, Prices, tensor_bytes
from autopar.planner.problem.strategies import LayoutSet
from autopar.planner.solver import is_forbidden

NONE: frozenset[int] = frozenset()


def in_micro_batches(
    built: Built, count: int, prices: Prices, once: Collection[int] = NONE, *, each_sum: bool = False
) -> Built:
    """The problem of `count` runs of a part: all costs times `count`, but for what the optimizer does, and for what
    waits for the end of the step. once: variables that are made, and gathered, once (`made_once.py`), which scatters
    gradients once; each_sum: gradients are summed in every part."""
    scaled: dict[object, tuple[Floats, Floats]] = {}  # equal operators share arrays by identity, and still do
    gathers: dict[tuple[object, ...], tuple[Floats, Floats]] = {}  # the arrays before stay alive beside: ids are keys
    waiting = _LateSums(prices, gather_once=bool(once))

    def times(costs: Floats) -> Floats:
        if id(costs) not in scaled:
            scaled[id(costs)] = costs, np.where(is_forbidden(costs), costs, costs * count)
        return scaled[id(costs)][1]

    def of_gradient(costs: Floats, source: Variable, parameter: Variable) -> Floats:
        key = (id(costs), id(source.layouts), id(parameter.stored))
        if key not in scaled:
            late = np.minimum(waiting.seconds(source, parameter), costs)
            scaled[key] = costs, np.where(is_forbidden(costs), costs, count * costs - (count - 1) * late)
        return scaled[key][1]

    def of_parameter(variable: Variable) -> Floats:
        key = (id(variable.costs), variable.labels, shape_of(variable.node))
        if key not in gathers:
            gathers[key] = variable.costs, variable.costs + (count - 1) * gather_seconds(variable, prices)
        return gathers[key][1]

    def of_edge(costs: Floats, source: int, target: int) -> Floats:
        if source in once:
            return costs
        if built.variables[target].kind != "parameter" or each_sum:
            return times(costs)
        return of_gradient(costs, built.variables[source], built.variables[target])

    edges = tuple(replace(edge, costs=of_edge(edge.costs, edge.source, edge.target)) for edge in built.problem.edges)
    for index, variable in enumerate(built.variables):
        if index not in once:
            variable.costs = of_parameter(variable) if variable.kind == "parameter" else times(variable.costs)
    return replace(
        built, problem=replace(built.problem, node_costs=tuple(v.costs for v in built.variables), edges=edges)
    )


class _LateSums:
    """What the last sums of gradients take, that wait for the end of a step."""

    def __init__(self, prices: Prices, *, gather_once: bool) -> None:
        self._prices, self._all = prices, gather_once

    def seconds(self, source: Variable, parameter: Variable) -> Floats:
        """(labels of what makes the gradient, labels of the parameter) seconds of its sums that wait."""
        shape, nbytes, stored = shape_of(parameter.node), tensor_bytes(parameter.node), parameter.stored
        made = _gradient_layouts(source, shape)
        assert stored is not None
        found = np.zeros((len(source.costs), len(parameter.costs)))
        if made is None:
            return found
        table = np.array([[self._of(shape, nbytes, one, other) for other in stored.distinct] for one in made.distinct])
        return np.asarray(table[np.ix_(made.index, stored.index)], dtype=np.float64)

    def _of(self, shape: tuple[int, ...], nbytes: int, made: Layout, stored: Layout) -> float:
        """Of one gradient: from where it is added up, to where it is stored."""
        pairs = list(zip(made, stored, strict=True))
        waits = [isinstance(one, Partial) and (self._all or other == Replicate()) for one, other in pairs]
        if not any(waits):
            return 0.0
        before = tuple(one if late else other for late, (one, other) in zip(waits, pairs, strict=True))
        return self._prices.redistribution_seconds(shape, nbytes, before, stored)


def _gradient_layouts(source: Variable, shape: tuple[int, ...]) -> LayoutSet | None:
    """The layouts of what is as large as a parameter among what a variable makes."""
    size = int(np.prod(shape))
    for output, layouts in enumerate(source.layouts):
        if layouts is not None and int(np.prod(shape_of(source.node, output))) == size:
            return layouts
    return None
