"""Restrict: take the choices away that the user's constraints forbid, from a problem that is built and priced.

A constraint never changes a price, so one `Built` serves every question about the same mesh: what stays of a label set
is a set of rows, of a table a block.

    costs of lm_head/mm#0   [R: 3.1, S(0): 1.2, S(1): 0.9] ms   --"lm_head": Replicate()-->   [R: 3.1] ms

Where a single constraint leaves a tensor nothing, its placement is impossible on this mesh; where several do it
together, or the rules between tensors do, `smallest_conflict` names a set of which none can be spared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ConfigurationError, InfeasibleError
from autopar.layouts.placement import Mesh, Partial, Placement, Replicate, Shard
from autopar.planner.problem.build import Built, Variable
from autopar.planner.problem.constraint_targets import BoundConstraint, Target, notes_of
from autopar.planner.problem.limits import LIMITS
from autopar.planner.problem.prices import Floats
from autopar.planner.problem.strategies import LayoutSet
from autopar.planner.solver import Edge, Problem, is_forbidden, solve

Flags = NDArray[np.bool_]
Rows = NDArray[np.int64]


class ImpossiblePlacement(ConfigurationError):
    """A tensor cannot lie as a constraint asks on this mesh, whatever the rest does."""


def restricted(built: Built, mesh: Mesh, constraints: Sequence[BoundConstraint]) -> Built:
    """The problem without the choices that the constraints forbid.

    Raises ImpossiblePlacement where a constraint alone leaves a tensor nothing, and InfeasibleError naming a smallest
    conflicting set where several do so together.
    """
    if not constraints:
        return built
    allowed = _allowed(built, mesh, constraints)
    rows: dict[int, Rows] = {}
    for index, by_constraint in allowed.items():
        kept = np.flatnonzero(np.all(list(by_constraint.values()), axis=0))
        if not len(kept):
            conflict = smallest_conflict(list(by_constraint), partial(_some_row_obeys, by_constraint))
            raise conflict_error(conflict, mesh, f"{built.variables[index].name} cannot obey them together")
        rows[index] = kept
    return narrowed(built, rows, notes_of(constraints))


def _some_row_obeys(masks: Mapping[BoundConstraint, Flags], constraints: Sequence[BoundConstraint]) -> bool:
    return bool(np.all([masks[constraint] for constraint in constraints], axis=0).any())


def smallest_conflict(
    constraints: Sequence[BoundConstraint], can_be_met: Callable[[Sequence[BoundConstraint]], bool]
) -> list[BoundConstraint]:
    """A set of constraints that cannot be met and of which none can be left out (deletion filter: one question per
    constraint)."""
    kept = list(constraints)
    for constraint in constraints:
        without = [other for other in kept if other is not constraint]
        if without and not can_be_met(without):
            kept = without
    return kept


def why_nothing_obeys(built: Built, mesh: Mesh, constraints: Sequence[BoundConstraint]) -> InfeasibleError | None:
    """The smallest conflict between the constraints where the rest of a built problem forbids them together, if any."""
    if not constraints or can_be_met(built, mesh, constraints):
        return None
    conflict = smallest_conflict(constraints, lambda some: can_be_met(built, mesh, some))
    return conflict_error(conflict, mesh, "what they ask of neighbouring tensors cannot be connected")


def conflict_error(conflict: Sequence[BoundConstraint], mesh: Mesh, why: str) -> InfeasibleError:
    """The error that names the constraints of which at least one must go."""
    listed = "; ".join(map(str, conflict))
    axes = ", ".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.shape, strict=True))
    return InfeasibleError(
        f"no plan obeys these constraints on the mesh {axes}: {listed}. {why}; leave out or loosen one of them"
    )


def can_be_met(built: Built, mesh: Mesh, constraints: Sequence[BoundConstraint]) -> bool:
    """Whether some assignment obeys the constraints and makes no forbidden choice. Seconds do not count: the problem
    that is solved costs 1 per forbidden choice. Unknown counts as yes."""
    try:
        problem = restricted(built, mesh, constraints).problem
    except InfeasibleError:
        return False
    marks: dict[int, Floats] = {}

    def mark(costs: Floats) -> Floats:
        return marks.setdefault(id(costs), is_forbidden(costs).astype(np.float64))

    counted = Problem(
        node_costs=tuple(mark(costs) for costs in problem.node_costs),
        edges=tuple(
            Edge(source=edge.source, target=edge.target, costs=mark(edge.costs))
            for edge in problem.edges
            if is_forbidden(edge.costs).any()
        ),
    )
    return solve(counted, time_limit=LIMITS.feasibility_seconds).lower_bound < 0.5


def _allowed(
    built: Built, mesh: Mesh, constraints: Sequence[BoundConstraint]
) -> dict[int, dict[BoundConstraint, Flags]]:
    """Variable -> constraint -> which of its labels obey."""
    found: dict[int, dict[BoundConstraint, Flags]] = {}
    for constraint in constraints:
        for target in constraint.targets:
            node, output = target.value
            index = built.operators[node] if node in built.operators else built.placeholders[node]
            variable = built.variables[index]
            mask = np.ones(len(variable.costs), dtype=bool)
            for axis in constraint.axes(mesh):
                lies = _lies(variable, target, output, axis, constraint.placement, mesh)
                if not lies.any():
                    raise _impossible(variable, target, output, axis, constraint, mesh)
                mask &= lies
            by_constraint = found.setdefault(index, {})
            by_constraint[constraint] = by_constraint[constraint] & mask if constraint in by_constraint else mask
    return found


def _lies(variable: Variable, target: Target, output: int, axis: int, placement: Placement, mesh: Mesh) -> Flags:
    """Which labels of a variable give the tensor a placement on an axis; of a parameter, stored and used."""
    flags = np.ones(len(variable.costs), dtype=bool)
    for layouts in _layouts(variable, output):
        fine = np.array([target.lies(layout, axis, placement, mesh) for layout in layouts.distinct])
        flags &= fine[layouts.index]
    return flags


def _layouts(variable: Variable, output: int) -> list[LayoutSet]:
    found = [variable.layouts[output], variable.stored]
    return [layouts for layouts in found if layouts is not None]


def _impossible(
    variable: Variable, target: Target, output: int, axis: int, constraint: BoundConstraint, mesh: Mesh
) -> ImpossiblePlacement:
    seen = {
        layout[axis]
        for layouts in _layouts(variable, output)
        for known in layouts.distinct
        if (layout := target.layout_seen(known, mesh)) is not None
    }
    options = [str(p) for kind in (Replicate, Shard, Partial) for p in sorted(filter(_is(kind), seen), key=str)]
    verb = "be stored" if variable.kind == "parameter" else "be made"
    return ImpossiblePlacement(
        f"constraint {constraint.pattern!r}: {target.name} {target.user_shape} cannot {verb} {constraint.placement} on "
        f"{mesh.axis_names[axis]}={mesh.shape[axis]}; it can be {', '.join(options)} there (in dims of {target.shape})"
    )


def _is(kind: type) -> Callable[[object], bool]:
    return lambda placement: isinstance(placement, kind)


def narrowed(built: Built, rows: dict[int, Rows], notes: Sequence[str]) -> Built:
    """Only these labels of these variables; arrays that were shared stay shared."""
    known: dict[tuple[int, bytes, bytes], Floats] = {}

    def block(costs: Floats, index: tuple[Rows, ...]) -> Floats:
        key = (id(costs), index[0].tobytes(), index[-1].tobytes())
        if key not in known:
            known[key] = np.ascontiguousarray(costs[np.ix_(*index)])
        return known[key]

    everything = {index: np.arange(len(v.costs)) for index, v in enumerate(built.variables)}
    variables = [
        _with_rows(variable, rows[index], block(variable.costs, (rows[index],))) if index in rows else variable
        for index, variable in enumerate(built.variables)
    ]
    edges = tuple(
        replace(edge, costs=block(edge.costs, tuple(rows.get(i, everything[i]) for i in (edge.source, edge.target))))
        if edge.source in rows or edge.target in rows
        else edge
        for edge in built.problem.edges
    )
    problem = replace(built.problem, node_costs=tuple(v.costs for v in variables), edges=edges)
    return replace(built, problem=problem, variables=variables, notes=[*built.notes, *notes])


def _with_rows(variable: Variable, rows: Rows, costs: Floats) -> Variable:
    def take(layouts: LayoutSet | None) -> LayoutSet | None:
        return None if layouts is None else LayoutSet(layouts.distinct, layouts.index[rows])

    strategies = variable.strategies
    return replace(
        variable,
        costs=costs,
        layouts=tuple(take(layouts) for layouts in variable.layouts),
        stored=take(variable.stored),
        labels=tuple(variable.labels[row] for row in rows) if variable.labels else (),
        availability=None if variable.availability is None else variable.availability[rows],
        strategies=None if strategies is None else strategies.take(rows),
    )
