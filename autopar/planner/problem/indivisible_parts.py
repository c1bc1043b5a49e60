"""Indivisible parts: what an operator cannot split over an axis of the mesh, because no part of it divides.

    attention of 6 heads on tp=4      "no split of h over tp=4: 6 does not divide"
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from autopar.layouts.placement import Mesh
from autopar.planner.problem.axis_choices import choices_of
from autopar.planner.problem.factorisation import Factorisation
from autopar.planner.problem.strategies import divides
from autopar.rules.rule import Rule


def indivisible_parts(
    node: fx.Node, rule: Rule, factorisation: Factorisation, sequence: Hashable, mesh: Mesh
) -> list[str]:
    """A line for every name of an operator's rule and every axis that divides no part of it."""
    parts: dict[str, list[tuple[int, bool]]] = {}
    for choice in choices_of(node, rule, factorisation, sequence=sequence):
        if choice.part is not None and choice.beside is None:
            parts.setdefault(choice.part[0], []).append((choice.atom, choice.may_be_uneven))
    return [
        f"no split of {name} over {axis}={size}: {' and '.join(str(atom) for atom, _ in atoms)} "
        f"{'does' if len(atoms) == 1 else 'do'} not divide"
        for axis, size in zip(mesh.axis_names, mesh.shape, strict=True)
        for name, atoms in parts.items()
        if not any(divides(atom, size, may_be_uneven) for atom, may_be_uneven in atoms)
    ]
