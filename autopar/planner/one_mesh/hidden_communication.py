"""Hidden communication: the objective of a search that takes gathers and reductions of parameters as partly overlapped.

    share 0     compute 0.20 s + reductions 0.40 s + activations 0.05 s = 0.65 s      every byte stops the rank
    share 0.9   compute 0.20 s + reductions 0.04 s + activations 0.05 s = 0.29 s      backward hides the reductions

What a step takes beside its computation is max(0, communication - what there is to hide it behind), which no sum of
costs says. Its optimum is that of the sum under some share between 0 and 1 (the multiplier of the maximum), so the
search runs under several shares, and of what they find the plan whose played step is the shortest is taken
(`choose_step.py`). Collectives on activations stand between the operators that make and read them: they are never
taken as hidden.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.planner.problem.build import Built, Variable
from autopar.planner.problem.factorisation import shape_of
from autopar.planner.problem.prices import Floats, Prices, tensor_bytes
from autopar.planner.solver import is_forbidden


def with_hidden(built: Built, share: float, prices: Prices, count: int = 1) -> Built:
    """The problem with `share` of the seconds of all communication of parameters taken off. prices: of the mesh; count:
    of micro-batches, each of which gathers."""
    scaled: dict[int, tuple[Floats, Floats]] = {}  # equal layers share arrays by identity, and still do
    kept: dict[tuple[object, ...], tuple[Floats, Floats]] = {}  # the arrays before stay alive beside: ids are keys

    def less(costs: Floats) -> Floats:
        if id(costs) not in scaled:
            scaled[id(costs)] = costs, np.where(is_forbidden(costs), costs, costs * (1.0 - share))
        return scaled[id(costs)][1]

    def of_parameter(variable: Variable) -> Floats:
        key = (id(variable.costs), variable.labels, shape_of(variable.node))
        if key not in kept:
            kept[key] = variable.costs, variable.costs - share * count * gather_seconds(variable, prices)
        return kept[key][1]

    variables = [
        replace(variable, costs=of_parameter(variable)) if variable.kind == "parameter" else variable
        for variable in built.variables
    ]
    of_parameters = {index for index, variable in enumerate(variables) if variable.kind == "parameter"}
    edges = tuple(
        replace(edge, costs=less(edge.costs)) if {edge.source, edge.target} & of_parameters else edge
        for edge in built.problem.edges
    )
    problem = replace(built.problem, node_costs=tuple(variable.costs for variable in variables), edges=edges)
    return replace(built, problem=problem, variables=variables)


def gather_seconds(variable: Variable, prices: Prices) -> Floats:
    """(labels,) seconds of one gather of a parameter from its stored to its used layout."""
    shape, nbytes = shape_of(variable.node), tensor_bytes(variable.node)
    return np.array(
        [prices.redistribution_seconds(shape, nbytes, label.stored, label.used) for label in variable.labels]
    )
