"""Notes: what a named axis was meant to split and cannot, and what the plan does instead; how experts run; that
products run in fp32 where the device has bf16.

batch 6 does not divide by dp_replicate=4: 100% of the FLOPs run replicated over it
5 attention heads do not divide by tp=2: attention splits the query sequence over it instead
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.graphs.expert_capacity import capacity_of
from autopar.hardware.devices import Device
from autopar.layouts.placement import Mesh
from autopar.planner.one_mesh.context_notes import picked_names
from autopar.planner.one_mesh.read_solution import flops_of_pass
from autopar.planner.problem.build import Built
from autopar.planner.problem.factorisation import shape_of
from autopar.planner.problem.strategies import divides
from autopar.plans.logical_shards import Deterministic, num_shards
from autopar.program import Program
from autopar.request.mesh_axes import BATCH_AXES

Assignment = NDArray[np.int64]

ATTENTION_DIMS = {"b": "the batch", "s": "the query sequence"}
"""Names of the rule of attention that stand in for its heads."""


def uneven_notes(program: Program, built: Built, assignment: Assignment, mesh: Mesh) -> list[str]:
    """One note per axis that cannot split the batch or the attention heads as its name promises."""
    notes: list[str] = []
    for axis, (name, size) in enumerate(zip(mesh.axis_names, mesh.shape, strict=True)):
        if name in BATCH_AXES:
            notes += [
                f"batch {batch} does not divide by {name}={size}: {_done_instead(built, assignment, axis)}"
                for batch in _batch_sizes(program)
                if not divides(batch, size, True)
            ]
        if name == "tp":
            notes += _attention_notes(built, assignment, axis, size)
    return notes


def shard_notes(deterministic: Deterministic, num_devices: int) -> list[str]:
    """How many logical shards a device computes, and what that costs."""
    shards = num_shards(deterministic)
    if not shards:
        return []
    return [
        f"deterministic={shards}: a device computes {shards // num_devices} of {shards} logical shards, one after the "
        "other, and exchanges gradients behind each"
    ]


def expert_notes(program: Program) -> list[str]:
    """That mixtures of experts run in the grouped form, which drops no token but beyond a capacity."""
    products = [
        node
        for node in program.graph.nodes
        if str(node.target) == "autopar.expert_linear.default" and node.meta["phase"] == "forward"
    ]
    if not products:
        return []
    capacity = capacity_of(products[0])
    dropped = (
        "no token is dropped (drop rate 0)"
        if capacity is None
        else f"where rows travel, those beyond {capacity:g} times an expert's even share of a rank's are dropped"
    )
    return [f"{len(products)} products of experts run in grouped form: {dropped}"]


def wide_notes(built: Built, device: Device) -> list[str]:
    """That most FLOPs run in fp32 on a GPU that multiplies bf16 faster, and how to change it."""
    flops = flops_of_pass(built)
    wide, total = flops.get("float32", 0.0), sum(flops.values())
    rates = device.flops_per_second
    if device.kind == "cpu" or 2 * wide <= total or not rates.get("bfloat16") or not rates.get("float32"):
        return []
    return [
        f"{wide / total:.0%} of the FLOPs run in fp32: {device.name} multiplies bf16 "
        f"{rates['bfloat16'] / rates['float32']:.2g} times as fast; precision=\"bf16\" (--precision bf16) keeps fp32 "
        "parameters, gradients and losses"
    ]


def symmetric_notes(symmetric: Mapping[str, Sequence[str]]) -> list[str]:
    """That products run with their collectives in symmetric memory. symmetric: kind of collective -> groups."""
    return [
        f"products run with their {kind} over {', '.join(groups)} in symmetric memory (asynchronous tensor "
        "parallelism); the gain is predicted, no GPU has confirmed it: symmetric_memory of the plan names what runs so"
        for kind, groups in symmetric.items()
    ]


def _batch_sizes(program: Program) -> list[int]:
    sizes = {
        entry.shape[entry.batch_dim]
        for entry in program.inputs
        if entry.role == "input" and entry.batch_dim is not None
    }
    return sorted(size for size in sizes if size > 1)


def _done_instead(built: Built, assignment: Assignment, axis: int) -> str:
    """How the FLOPs are spread over an axis that cannot split the batch."""
    whole = total = 0.0
    for node, rule in built.rules.items():
        total += rule.flops
        whole += rule.flops * (_picked(built, assignment, node, axis) is None)
    share = whole / total if total else 1.0
    rest = "" if share == 1.0 else ", the others split another dim"
    return f"{share:.0%} of the FLOPs run replicated over it{rest}"


def _attention_notes(built: Built, assignment: Assignment, axis: int, size: int) -> list[str]:
    notes: dict[str, None] = {}
    for node, rule in built.rules.items():
        if not str(node.target).startswith("autopar.attention."):
            continue
        heads = shape_of(node)[1]
        if any(rule.sizes.get(name, 1) % size == 0 for name in ("h", "g")):
            continue
        picked = _picked(built, assignment, node, axis)
        instead = f"splits {ATTENTION_DIMS.get(picked, picked)} over it" if picked else "runs replicated over it"
        notes[f"{heads} attention heads do not divide by tp={size}: attention {instead} instead"] = None
    return list(notes)


def _picked(built: Built, assignment: Assignment, node: fx.Node, axis: int) -> str | None:
    """The name that an operator splits over an axis; None if it is replicated."""
    return picked_names(built, assignment, node)[axis]
