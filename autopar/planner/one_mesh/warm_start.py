"""Warm start: the labels of a problem that say what an older plan says.

    plan   "layers.0.up/mm#0": axes (b, n)     ->   the label of operator layers.0.up/mm#0 with the axes (b, n)
    plan   nothing of "layers.8.up/mm#0"       ->   the label that is cheapest beside its neighbours

Decisions are matched by name and layouts, so the older plan may belong to another number of layers, another batch or
other prices; its mesh must have the same sizes. The solver takes the labels as its first assignment: they can only
spare it the search for good plans, never the proof.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autopar.layouts.placement import Layout, Mesh
from autopar.planner.problem.build import Built, Variable
from autopar.planner.problem.strategies import LayoutSet
from autopar.plans.parallel_plan import Plan

SWEEPS = 2
"""How often what the plan leaves open is fitted to its neighbours."""

Rows = NDArray[np.int64]


def labels_like(built: Built, mesh: Mesh, plan: Plan) -> Rows | None:
    """(variables,) one label each, as the plan says; None where the plan has a mesh of other sizes."""
    if plan.mesh.shape != mesh.shape:
        return None
    open_rows = [_rows_or_all(variable, built, plan) for variable in built.variables]
    labels = np.array([rows[np.argmin(v.costs[rows])] for rows, v in zip(open_rows, built.variables, strict=True)])
    fit_open(built, open_rows, labels)
    return labels


def _rows_or_all(variable: Variable, built: Built, plan: Plan) -> Rows:
    rows = rows_like(variable, built, plan)
    return rows if len(rows) else np.arange(len(variable.costs))


def rows_like(variable: Variable, built: Built, plan: Plan, *, any_implementation: bool = False) -> Rows:
    """The labels of a variable that agree with the plan: all of them where the plan does not know it, none where what
    the plan says of it is no choice of this problem."""
    everything = np.arange(len(variable.costs))
    if variable.kind == "parameter" and variable.name in plan.parameters:
        wanted = plan.parameters[variable.name]
        same = [
            (label.stored, label.used, label.keep_gathered) == (wanted.stored, wanted.used, wanted.keep_gathered)
            for label in variable.labels
        ]
        rows = np.flatnonzero(same)
    elif variable.kind == "operator" and variable.name in plan.operators and variable.strategies is not None:
        entry = plan.operators[variable.name]
        strategies = variable.strategies
        rows = np.flatnonzero([axes == entry.axes for axes in strategies.axes])
        if not any_implementation:
            rows = rows[[strategies.implementation(row) == entry.implementation for row in rows.tolist()]]
        for layouts, layout in zip(variable.strategies.outputs, entry.outputs, strict=False):
            rows = rows[_lies(layouts, layout)[rows]] if layouts is not None else rows
        for operand, layout in zip(variable.strategies.inputs, entry.inputs, strict=False):
            rows = rows[_lies(operand, layout)[rows]]
    else:
        known = _layout_of_data(variable, built, plan)
        rows = everything if known is None else np.flatnonzero(_lies(variable.layouts[0], known))
    return rows


def _lies(layouts: LayoutSet | None, layout: Layout) -> NDArray[np.bool_]:
    assert layouts is not None
    return np.array([known == layout for known in layouts.distinct])[layouts.index]


def _layout_of_data(variable: Variable, built: Built, plan: Plan) -> Layout | None:
    if variable.kind == "data":
        known: Mapping[str, Layout] = {**plan.outputs, **plan.inputs}
        return known.get(variable.name)
    if variable.kind != "copy":
        return None
    name = str(variable.node.meta["operator"])
    forward = variable.phase == "forward"
    if name in plan.parameters:
        parameter = plan.parameters[name]
        return parameter.shared_forward if forward else parameter.shared_backward
    if name not in plan.operators:
        return None
    shared = plan.operators[name].shared_forward if forward else plan.operators[name].shared_backward
    outputs = {built.copies.get(((variable.node, o), variable.phase)): o for o in range(len(shared))}
    output = next((o for index, o in outputs.items() if index is not None and built.variables[index] is variable), None)
    return None if output is None else shared[output]


def fit_open(built: Built, open_rows: list[Rows], labels: Rows) -> None:
    """Give every variable with several labels left the one that is cheapest beside its neighbours, in `labels`."""
    neighbours: dict[int, list[tuple[int, NDArray[np.float64], bool]]] = {}
    for edge in built.problem.edges:
        neighbours.setdefault(edge.source, []).append((edge.target, edge.costs, True))
        neighbours.setdefault(edge.target, []).append((edge.source, edge.costs, False))
    still_open = [index for index, rows in enumerate(open_rows) if len(rows) > 1]
    for _ in range(SWEEPS):
        for index in still_open:
            costs = built.problem.node_costs[index].copy()
            for other, table, is_source in neighbours.get(index, ()):
                costs += table[:, labels[other]] if is_source else table[labels[other]]
            labels[index] = open_rows[index][np.argmin(costs[open_rows[index]])]
