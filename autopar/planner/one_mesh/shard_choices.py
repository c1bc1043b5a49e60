"""Shard choices: the problem of a plan that splits the batch alone, in logical shards (`batch/shard_layouts.py`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.layouts.placement import Mesh, Placement
from autopar.planner.batch.shard_layouts import OperatorLayout, ShardLayouts, axis_of_batch, lies_so
from autopar.planner.one_mesh.restrict import narrowed
from autopar.planner.problem.build import Built, Variable
from autopar.planner.problem.strategies import LayoutSet


def in_logical_shards(built: Built, mesh: Mesh, shards: ShardLayouts) -> Built:
    """The problem without the choices that split more than the batch. Raises InfeasibleError naming an operator that
    has no other."""
    axis = axis_of_batch(mesh)
    if axis is None:
        return built
    rows = {}
    for node, index in built.operators.items():
        asked, variable = shards.operators.get(str(node.meta["operator"])), built.variables[index]
        if asked is None or variable.strategies is None:
            continue
        kept = np.flatnonzero(_obeys(variable, asked, axis, mesh))
        if not len(kept):
            raise InfeasibleError(
                f"deterministic={shards.count}: {variable.name} does not run on the samples of a rank alone over "
                f"{mesh.axis_names[axis]}={mesh.shape[axis]}; deterministic=True asks for equal bits of equal plans"
            )
        rows[index] = kept
    return narrowed(built, rows, ())


def _obeys(variable: Variable, asked: OperatorLayout, axis: int, mesh: Mesh) -> NDArray[np.bool_]:
    """Which strategies of an operator place its tensors so."""
    assert variable.strategies is not None
    flags = np.ones(len(variable.costs), dtype=bool)
    made = [layouts for layouts in variable.strategies.outputs if layouts is not None]
    pairs: list[tuple[LayoutSet, Placement | None]] = [
        *zip(variable.strategies.inputs, asked.inputs, strict=True),
        *zip(made, asked.outputs, strict=True),
    ]
    for layouts, placement in pairs:
        fine = np.array([lies_so(layout, placement, axis, mesh) for layout in layouts.distinct])
        flags &= fine[layouts.index]
    return flags
