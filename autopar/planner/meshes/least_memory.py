"""Least memory: what no plan can do without, known before anything is priced.

    8 devices, 8.0e9 parameters, AdamW in fp32:  16 bytes * 8.0e9 / 8 = 16 GB on the fullest device, at least

Parameters, gradients and optimizer state are there at the end of every backward pass, and the fullest device holds at
least the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.graphs.operator_names import base_name
from autopar.layouts.placement import Mesh
from autopar.planner.memory.shortage import DoesNotFit
from autopar.planner.one_mesh.query import Query
from autopar.planner.problem.graph_operators import base_of, operators
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.planner.problem.prices import tensor_bytes
from autopar.request.offload import PARAMETERS
from autopar.rules.engine import tensor_operands

PARTS = "parameters, gradients and optimizer state, were they split over all devices"

COPIES = "parameters, gradients and optimizer state, whole along dp_replicate"

LARGEST = "the largest parameter, were it split over all devices"


def least_state_bytes(states: Mapping[str, StateBytes], query: Query, mesh: Mesh | None = None) -> float:
    """A bound on the bytes per device: every parameter with gradient and state, over all devices, or over those along
    the axes of a mesh that may split them."""
    entries = [entry for entry in query.program.inputs if entry.role == "parameter"]
    total = sum(
        math.prod(entry.shape) * (entry.dtype.itemsize + states[entry.name].gradient + states[entry.name].optimizer)
        for entry in entries
    )
    return total / (query.cluster.num_devices if mesh is None else _splitting(mesh))


def _splitting(mesh: Mesh) -> int:
    """Ranks along the axes that parameters may be split over."""
    return math.prod(size for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if name != "dp_replicate")


def why_states_do_not_fit(query: Query, mesh: Mesh) -> DoesNotFit | None:
    """The failure of a mesh of named axes where the states alone are too large along those that split them."""
    least = least_state_bytes(query.state_bytes, query, mesh)
    if least <= query.budget_bytes or PARAMETERS in query.may_wait_on_host:
        return None
    return DoesNotFit(mesh, least, query.budget_bytes, {COPIES if _splitting(mesh) < mesh.size else PARTS: least})


def why_nothing_fits(query: Query, meshes: Sequence[Mesh]) -> DoesNotFit | None:
    """The failure of all meshes where the states alone are too large, if they are; where they may wait on the host, the
    largest parameter, which is read on the device. It names the mesh that has one axis across nodes and one inside, if
    there is one: changes that would fit are looked for on it."""
    part, least = PARTS, least_state_bytes(query.state_bytes, query)
    if PARAMETERS in query.may_wait_on_host:
        part, least = LARGEST, _largest_parameter(query) / query.cluster.num_devices
    if least <= query.budget_bytes:
        return None
    per_node = query.cluster.devices_per_node
    ordinary = (mesh for mesh in meshes if len(mesh.shape) == 2 and mesh.shape[1] == per_node)
    return DoesNotFit(next(ordinary, meshes[0]), least, query.budget_bytes, {part: least})


def _largest_parameter(query: Query) -> int:
    entries = [entry for entry in query.program.inputs if entry.role == "parameter"]
    return max((math.prod(entry.shape) * entry.dtype.itemsize for entry in entries), default=0)


def least_product_bytes(query: Query) -> float:
    """A bound on the bytes per device, wherever everything waits: a matrix product reads its operands and writes its
    result there, and the fullest device has at least the mean of them."""
    largest = 0
    for node in operators(query.program):
        if base_name(node.target) == "mm":
            read = {base_of(operand)[0] for operand in tensor_operands(node)}
            largest = max(largest, tensor_bytes(node) + sum(tensor_bytes(*value) for value in read))
    return largest / query.cluster.num_devices
