"""Plans travel: what was decided on a coarser mesh, said on a finer one.

    mesh (32, 8)        x lies (S(0), R)          mm#0 splits (m, n)
    mesh (2, 16, 8)     x lies (S(0), S(0), R)    mm#0 splits (m, m, n)

Both of the axes into which one was cut do what it did (`part_of`: 0, 0, 1), so every tensor is cut into the same
blocks. The labels are a start for the finer mesh: its search never ends above what they cost there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.layouts.placement import Layout, Mesh
from autopar.layouts.views import canonical
from autopar.planner.one_mesh.warm_start import fit_open
from autopar.planner.problem.build import Built, Variable
from autopar.planner.problem.factorisation import shape_of, value_of
from autopar.planner.problem.strategies import LayoutSet
from autopar.rules.engine import tensor_operands

Names: TypeAlias = tuple[str | None, ...]
Decision: TypeAlias = tuple[Names, bool, tuple[Layout | None, ...]]
"""Of an operator: what every axis splits, False, layouts of its operands and outputs. Of a parameter: (), whether the
gathered one is kept, (stored, used). Of anything else: (), False, its layout."""
Labels: TypeAlias = NDArray[np.int64]
Shapes: TypeAlias = tuple[tuple[int, ...], ...]


def decisions(built: Built, assignment: Labels) -> list[Decision]:
    """What an assignment decides, per variable; equal variables share one object."""
    known: dict[tuple[int, int], Decision] = {}
    found = []
    for variable, label in zip(built.variables, assignment.tolist(), strict=True):
        key = id(_label_set(variable)), label
        if key not in known:
            known[key] = _decision(variable, label)
        found.append(known[key])
    return found


def labels_on(built: Built, mesh: Mesh, decided: Sequence[Decision], part_of: Sequence[int]) -> Labels:
    """(variables,) labels on a finer mesh: the same decisions, or the cheapest beside its neighbours where none is
    equal. part_of: per axis of `mesh` the axis of the coarser one of which it is a part."""
    known: dict[tuple[int, int, Shapes], Labels] = {}
    copied = {index: (shape_of(*value),) for (value, _), index in built.copies.items()}
    open_rows = []
    for index, (variable, decision) in enumerate(zip(built.variables, decided, strict=True)):
        shapes = copied.get(index, ()) if variable.strategies is None else ()
        key = id(_label_set(variable)), id(decision), shapes
        if key not in known:
            known[key] = _rows(variable, mesh, decision, part_of, shapes or _shapes(variable))
        open_rows.append(known[key])
    labels = np.array([rows[np.argmin(v.costs[rows])] for rows, v in zip(open_rows, built.variables, strict=True)])
    fit_open(built, open_rows, labels)
    return labels


def _label_set(variable: Variable) -> object:
    """The object of which labels are rows: variables that share it have the same choices."""
    return variable.strategies or variable.labels or variable.layouts[0]


def _decision(variable: Variable, label: int) -> Decision:
    if variable.strategies is not None:
        strategies = variable.strategies
        tensors = (*strategies.inputs, *strategies.outputs)
        return strategies.axes[label], False, tuple(_layout(layouts, label) for layouts in tensors)
    if variable.labels:
        chosen = variable.labels[label]
        return (), chosen.keep_gathered, (chosen.stored, chosen.used)
    return (), False, (_layout(variable.layouts[0], label),)


def _layout(layouts: LayoutSet | None, label: int) -> Layout | None:
    return None if layouts is None else layouts.distinct[layouts.index[label]]


def _rows(variable: Variable, mesh: Mesh, decision: Decision, part_of: Sequence[int], shapes: Shapes) -> Labels:
    """The labels of a variable that decide the same; all of them where none does."""
    axes, keeps, layouts = decision
    wanted = [
        None if layout is None else canonical(shape, tuple(layout[part] for part in part_of), mesh.shape)
        for layout, shape in zip(layouts, shapes, strict=True)
    ]
    if variable.strategies is not None:
        names = tuple(axes[part] for part in part_of)
        rows = np.flatnonzero([spelled == names for spelled in variable.strategies.axes])
        tensors = (*variable.strategies.inputs, *variable.strategies.outputs)
        for offered, layout in zip(tensors, wanted, strict=True):
            rows = rows if offered is None else rows[_lies(offered, layout)[rows]]
    elif variable.labels:
        stored, used = wanted
        labels = [(label.keep_gathered, label.stored, label.used) for label in variable.labels]
        rows = np.flatnonzero([label == (keeps, stored, used) for label in labels])
    else:
        offered = variable.layouts[0]
        assert offered is not None, "inputs, outputs and copies are tensors"
        rows = np.flatnonzero(_lies(offered, wanted[0]))
    return rows if len(rows) else np.arange(len(variable.costs))


def _lies(offered: LayoutSet, wanted: Layout | None) -> NDArray[np.bool_]:
    return np.array([layout == wanted for layout in offered.distinct])[offered.index]


def _shapes(variable: Variable) -> Shapes:
    """Shapes of the tensors of a decision, in its order; those of a copy depend on the output that it copies."""
    if variable.strategies is None:
        return (shape_of(variable.node),) * (2 if variable.labels else 1)
    operands = [shape_of(*value_of(operand)) for operand in tensor_operands(variable.node)]
    outputs = [
        () if layouts is None else shape_of(variable.node, output)
        for output, layouts in enumerate(variable.strategies.outputs)
    ]
    return (*operands, *outputs)
