"""Micro-costs: the problem of one part of the batch -> the problem of the step that runs it several times.

    built = in_micro_batches(built, 4, prices)        gathers, operators, reductions 4 times; the optimizer once

A part is priced at its own shapes, so launch latencies and small collectives show. Gradients are reduced per part, as
they are lowered. Costs never fall with the number of parts, so more than one is tried only where memory binds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.planner.one_mesh.hidden_communication import gather_seconds
from autopar.planner.problem.build import Built, Variable
from autopar.planner.problem.factorisation import shape_of
from autopar.planner.problem.prices import Floats, Prices
from autopar.planner.solver import is_forbidden


def in_micro_batches(built: Built, count: int, prices: Prices) -> Built:
    """The problem of `count` runs of a part: all costs times `count`, but for what the optimizer does."""
    scaled: dict[int, tuple[Floats, Floats]] = {}  # equal operators share arrays by identity, and still do
    gathers: dict[tuple[object, ...], tuple[Floats, Floats]] = {}  # the arrays before stay alive beside: ids are keys

    def times(costs: Floats) -> Floats:
        if id(costs) not in scaled:
            scaled[id(costs)] = costs, np.where(is_forbidden(costs), costs, costs * count)
        return scaled[id(costs)][1]

    def of_parameter(variable: Variable) -> Floats:
        key = (id(variable.costs), variable.labels, shape_of(variable.node))
        if key not in gathers:
            gathers[key] = variable.costs, variable.costs + (count - 1) * gather_seconds(variable, prices)
        return gathers[key][1]

    for variable in built.variables:
        variable.costs = of_parameter(variable) if variable.kind == "parameter" else times(variable.costs)
    edges = tuple(replace(edge, costs=times(edge.costs)) for edge in built.problem.edges)
    return replace(
        built, problem=replace(built.problem, node_costs=tuple(v.costs for v in built.variables), edges=edges)
    )
