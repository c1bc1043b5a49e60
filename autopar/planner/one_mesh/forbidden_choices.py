"""Forbidden choices: where a solution breaks what was asked, in words of operators and sizes.

    attn.q/mm#0 (8, 15, 35) beside attn.q/view#0: no split of h over tp=2: 5 does not divide

A choice is forbidden where nothing connects what two neighbours must do. The sizes of the axes that would divide, and
the constraints to leave out, are the ways out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.errors import InfeasibleError
from autopar.layouts.placement import Mesh
from autopar.planner.one_mesh.query import Query
from autopar.planner.problem.build import Built
from autopar.planner.problem.factorisation import sequence_class, shape_of
from autopar.planner.problem.indivisible_parts import indivisible_parts
from autopar.planner.solver import Solution, is_forbidden

MOST_NAMED = 3
"""Places that an error names."""


def why_forbidden(query: Query, built: Built, mesh: Mesh, solution: Solution) -> InfeasibleError:
    """The error of a mesh whose best solution still makes forbidden choices."""
    axes = ", ".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))
    return InfeasibleError(
        f"no plan obeys the constraints on the mesh {axes}: nothing connects "
        f"{forbidden_places(query, built, mesh, solution)}. "
        f"{_ways_out(query, built, mesh, _forbidden_pairs(built, solution))}"
    )


def forbidden_places(query: Query, built: Built, mesh: Mesh, solution: Solution) -> str:
    """The first forbidden choices of a solution: operators, shapes, and what does not divide in them."""
    pairs = _forbidden_pairs(built, solution)
    said = [_described(query, built, mesh, pair) for pair in pairs[:MOST_NAMED]]
    return "; ".join([*said, f"{len(pairs) - MOST_NAMED} more"] if len(pairs) > MOST_NAMED else said)


def _forbidden_pairs(built: Built, solution: Solution) -> list[tuple[int, ...]]:
    """The variables of every choice that costs what only forbidden ones do."""
    problem, labels = built.problem, solution.assignment
    alone = [(i,) for i, costs in enumerate(problem.node_costs) if is_forbidden(np.asarray(costs[labels[i]]))]
    together = [
        (edge.source, edge.target)
        for edge in problem.edges
        if is_forbidden(np.asarray(edge.costs[labels[edge.source], labels[edge.target]]))
    ]
    return [*alone, *together]


def _described(query: Query, built: Built, mesh: Mesh, pair: tuple[int, ...]) -> str:
    """The operators of a pair with their shapes, and what does not divide in them."""
    variables = [built.variables[index] for index in pair]
    named = " beside ".join(f"{each.name} {shape_of(each.node)}" for each in variables)
    lines = [line for index in pair for line in _indivisible(query, built, mesh, index)]
    return f"{named} ({', '.join(dict.fromkeys(lines))})" if lines else named


def _indivisible(query: Query, built: Built, mesh: Mesh, index: int) -> list[str]:
    node = built.variables[index].node
    rule = built.rules.get(node)
    if rule is None:
        return []
    sequence = sequence_class(query.program, query.factorisation)
    return indivisible_parts(node, rule, query.factorisation, sequence, mesh)


def _ways_out(query: Query, built: Built, mesh: Mesh, pairs: list[tuple[int, ...]]) -> str:
    """Sizes of each axis that divide a part of every operator named, and what may be left out."""
    named = sorted({index for pair in pairs for index in pair if _indivisible(query, built, mesh, index)})
    sizes = {
        axis: _dividing(query, built, axis, size, named) if named else []
        for axis, size in zip(mesh.axis_names, mesh.shape, strict=True)
    }
    dims = ", ".join(f"{axis}={' or '.join(map(str, found))}" for axis, found in sizes.items() if found)
    asked = "leave out no_replicated_compute" if query.constraints.no_replicated_compute else "loosen constraints="
    divided = f"ask for sizes that divide a part of each (dims: {dims}), " if dims else ""
    return f"Ways out: {divided}make a size of the model or batch divide, {asked}, or give no dims: meshes are searched"


def _dividing(query: Query, built: Built, axis: str, size: int, named: Sequence[int]) -> list[int]:
    """The sizes of an axis next to its own over which each operator can split something more."""

    def lines(index: int, cut: int) -> int:
        return len(_indivisible(query, built, Mesh(axis_names=(axis,), shape=(cut,)), index))

    other = [cut for cut in range(2, 2 * size + 6) if cut != size]
    fitting = [cut for cut in other if all(lines(index, cut) < lines(index, size) for index in named)]
    return fitting[:MOST_NAMED]
