"""Axis roles: what each free axis of a chosen plan does, in the words of the field.

    axis outer=32 (across nodes) works as dp_shard: 98% of the FLOPs split the batch over it, ...
    axis inner=8 (inside a node) works as tp: 91% of the FLOPs split dims of weights over it, ...

An operator splits over an axis the batch, a dim of weights (also heads, which are one), another dim of activations
(the sequence), or nothing. The role is the kind that most FLOPs have; with the batch it is dp_shard where most bytes of
the parameters are stored split over the axis, dp_replicate where they are not.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Literal

from torch import fx

from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Layout, Mesh, Shard
from autopar.passes.tidy.place_casts import is_cast
from autopar.planner.meshes.mesh_shapes import links_of_axes
from autopar.planner.problem.build import Built
from autopar.planner.problem.factorisation import Factorisation, Value, batch_class, shape_of, value_of
from autopar.planner.problem.graph_operators import base_of
from autopar.planner.problem.prices import tensor_bytes
from autopar.planner.solver import Solution
from autopar.program import Program
from autopar.request.mesh_axes import AXIS_NAMES
from autopar.rules.engine import tensor_operands

Kind = Literal["batch", "weights", "sequence", "nothing"]

ROLES: dict[Kind, tuple[str, str]] = {
    "batch": ("dp", "split the batch"),
    "weights": ("tp", "split dims of weights"),
    "sequence": ("sequence", "split the sequence or another dim that only activations have"),
    "nothing": ("replicated", "run whole on every rank"),
}
"""Kind of most FLOPs -> (role, what these FLOPs do)."""


def axis_notes(
    program: Program, factorisation: Factorisation, cluster: Cluster, mesh: Mesh, built: Built, solution: Solution
) -> list[str]:
    """One line per axis that no preset names, with its link and its role."""
    links = links_of_axes(cluster, mesh)
    stored = _stored_split_shares(built, solution, mesh)
    work = _work_shares(program, factorisation, built, solution, mesh)
    notes = []
    for axis, (name, size) in enumerate(zip(mesh.axis_names, mesh.shape, strict=True)):
        if name in AXIS_NAMES or size == 1 or not work[axis]:
            continue
        kind = max(work[axis], key=lambda k: work[axis][k])
        role, does = ROLES[kind]
        if kind == "batch":
            role = "dp_shard" if stored[axis] >= 0.5 else "dp_replicate"
        share = work[axis][kind] / sum(work[axis].values())
        notes.append(
            f"axis {name}={size} ({links[name]}) works as {role}: {share:.0%} of the FLOPs {does} over it, "
            f"{stored[axis]:.0%} of the parameter bytes are stored split over it"
        )
    return notes


def _stored_split_shares(built: Built, solution: Solution, mesh: Mesh) -> list[float]:
    """Per axis the part of the parameters' bytes that is stored split over it."""
    split, total = [0.0] * len(mesh.shape), 0.0
    for node, index in built.placeholders.items():
        variable = built.variables[index]
        if variable.kind != "parameter":
            continue
        nbytes = tensor_bytes(node)
        total += nbytes
        for axis, placement in enumerate(variable.labels[int(solution.assignment[index])].stored):
            split[axis] += nbytes * isinstance(placement, Shard)
    return [share / total if total else 0.0 for share in split]


def _work_shares(
    program: Program, factorisation: Factorisation, built: Built, solution: Solution, mesh: Mesh
) -> list[dict[Kind, float]]:
    """Per axis the FLOPs of the heavy operators by what they split over it."""
    batch = batch_class(program, factorisation)
    weights = {
        factorisation.atom_class((node, 0), dim, position)
        for node in _weights(built)
        for dim in range(len(shape_of(node)))
        for position in range(len(factorisation.atoms((node, 0), dim)))
    }
    found: list[dict[Kind, float]] = [{} for _ in mesh.shape]
    for node, index in built.operators.items():
        if node in built.heavy:
            layouts = list(_layouts(built, node, int(solution.assignment[index])))
            for axis in range(len(mesh.shape)):
                split = {_split_class(factorisation, value, layout, axis) for value, layout in layouts}
                kind = _kind(split - {None}, batch, weights)
                found[axis][kind] = found[axis].get(kind, 0.0) + built.rules[node].flops
    return found


def _weights(built: Built) -> list[fx.Node]:
    """Parameters that heavy operators read, as they are or cast."""
    found: dict[fx.Node, None] = {}
    for node in (n for n in built.operators if n in built.heavy):
        for operand in tensor_operands(node):
            (source, _), _ = base_of(operand)
            if is_cast(source):
                (source, _), _ = base_of(source.all_input_nodes[0])
            index = built.placeholders.get(source)
            if index is not None and built.variables[index].kind == "parameter":
                found[source] = None
    return list(found)


def _layouts(built: Built, node: fx.Node, label: int) -> Iterator[tuple[Value, Layout]]:
    """Operands and outputs of an operator with their layouts."""
    strategies = built.variables[built.operators[node]].strategies
    assert strategies is not None
    for operand, layouts in zip(tensor_operands(node), strategies.inputs, strict=True):
        yield value_of(operand), layouts.distinct[layouts.index[label]]
    for output, outputs in enumerate(strategies.outputs):
        if outputs is not None:
            yield (node, output), outputs.distinct[outputs.index[label]]


def _split_class(factorisation: Factorisation, value: Value, layout: Layout, axis: int) -> Hashable:
    """The class of the atom that an axis splits in a tensor; None where it splits none or only a part of one."""
    placement = layout[axis]
    if not isinstance(placement, Shard):
        return None
    atoms = factorisation.atoms(value, placement.dim)
    for position in range(len(atoms)):
        if math.prod(atoms[:position]) == placement.split:
            return factorisation.atom_class(value, placement.dim, position)
    return None


def _kind(split: set[Hashable], batch: Hashable, weights: set[Hashable]) -> Kind:
    if batch in split:
        return "batch"
    if split & weights:
        return "weights"
    return "sequence" if split else "nothing"
