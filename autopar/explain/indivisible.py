"""Indivisible: what an operator cannot split over an axis of the mesh, because no part of it divides.

    attention of 6 heads on tp=4      "no split of h over tp=4: 6 does not divide"

A size is no limit that could be taken away at fixed prices, since another size is another program: what it costs says
the plan of a model whose size divides.
"""

from __future__ import annotations

from autopar.planner.one_mesh.recovered_problem import Recovered
from autopar.planner.problem.axis_choices import choices_of
from autopar.planner.problem.strategies import divides


def indivisible_names(recovered: Recovered, index: int) -> list[str]:
    """A line for every name of an operator's rule and every axis that divides no part of it."""
    variable, rules = recovered.built.variables[index], recovered.built.rules
    if variable.kind != "operator" or variable.node not in rules:
        return []
    parts: dict[str, list[tuple[int, bool]]] = {}
    for choice in choices_of(variable.node, rules[variable.node], recovered.query.factorisation):
        if choice.part is not None:
            parts.setdefault(choice.part[0], []).append((choice.atom, choice.may_be_uneven))
    return [
        f"no split of {name} over {axis}={size}: {' and '.join(str(atom) for atom, _ in atoms)} "
        f"{'does' if len(atoms) == 1 else 'do'} not divide"
        for axis, size in zip(recovered.mesh.axis_names, recovered.mesh.shape, strict=True)
        for name, atoms in parts.items()
        if not any(divides(atom, size, may_be_uneven) for atom, may_be_uneven in atoms)
    ]
