"""Indivisible: what an operator of a plan cannot split, as an answer of explain.

A size is no limit that could be taken away at fixed prices, since another size is another program: what it costs says
the plan of a model whose size divides.
"""

from __future__ import annotations

from autopar.planner.one_mesh.recovered_problem import Recovered
from autopar.planner.problem.factorisation import sequence_class
from autopar.planner.problem.indivisible_parts import indivisible_parts


def indivisible_names(recovered: Recovered, index: int) -> list[str]:
    """A line for every name of an operator's rule and every axis that divides no part of it."""
    variable, rules, query = recovered.built.variables[index], recovered.built.rules, recovered.query
    if variable.kind != "operator" or variable.node not in rules:
        return []
    sequence = sequence_class(query.program, query.factorisation)
    return indivisible_parts(variable.node, rules[variable.node], query.factorisation, sequence, recovered.mesh)
