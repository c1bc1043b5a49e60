"""Notes: what a named axis was meant to split and cannot, and what the plan does instead; how experts run; that
products run in fp32 where the device has bf16.

batch 6 does not divide by dp_replicate=4: 100% of the FLOPs run replicated over it
5 attention heads do not divide by tp=2: attention splits the query sequence over it instead
a sequence of 37 does not divide by cp=2: 60% of the FLOPs run replicated over it, ...; a multiple of 4 is split evenly
cp="ulysses": 2 of 2 attentions do otherwise over cp=8 (gather): 4 heads of queries, 2 of keys do not divide by 8
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.hardware.devices import Device
from autopar.layouts.placement import Mesh
from autopar.planner.one_mesh.read_solution import flops_of_pass
from autopar.planner.problem.build import Built
from autopar.planner.problem.factorisation import shape_of
from autopar.planner.problem.strategies import divides
from autopar.plans.logical_shards import Deterministic, num_shards
from autopar.program import Program
from autopar.request.context_parallelism import ContextParallelism
from autopar.request.mesh_axes import BATCH_AXES, CONTEXT_AXES
from autopar.rules.rule import Rule

Assignment = NDArray[np.int64]

ATTENTION_DIMS = {"b": "the batch", "s": "the query sequence"}
"""Names of the rule of attention that stand in for its heads."""


def uneven_notes(
    program: Program, built: Built, assignment: Assignment, mesh: Mesh, cp: ContextParallelism | None
) -> list[str]:
    """One note per axis that cannot split the batch, the sequence or the attention heads as its name promises, or as
    `cp=` asks."""
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
        if name in CONTEXT_AXES and size > 1:
            notes += _length_notes(built, assignment, axis, name, size)
            notes += _way_notes(built, assignment, axis, name, size, cp)
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
    """That mixtures of experts run in the grouped form, which drops no token."""
    products = sum(
        str(node.target) == "autopar.expert_linear.default" and node.meta["phase"] == "forward"
        for node in program.graph.nodes
    )
    grouped = f"{products} products of experts run in grouped form: no token is dropped (drop rate 0)"
    return [grouped] if products else []


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
        if not _attends(node):
            continue
        heads = shape_of(node)[1]
        if any(rule.sizes.get(name, 1) % size == 0 for name in ("h", "g")):
            continue
        picked = _picked(built, assignment, node, axis)
        instead = f"splits {ATTENTION_DIMS.get(picked, picked)} over it" if picked else "runs replicated over it"
        notes[f"{heads} attention heads do not divide by tp={size}: attention {instead} instead"] = None
    return list(notes)


def _attends(node: fx.Node) -> bool:
    """Whether a node is attention, forward."""
    return str(node.target).startswith("autopar.attention.")


def _length_notes(built: Built, assignment: Assignment, axis: int, name: str, size: int) -> list[str]:
    """Of the sequences that context parallelism cannot split evenly."""
    lengths = {rule.sizes.get("s", size) for node, rule in built.rules.items() if _attends(node)}
    return [
        f"a sequence of {length} does not divide by {name}={size}: {_done_instead(built, assignment, axis)}; a "
        f"multiple of {2 * size} is split evenly"
        for length in sorted(lengths)
        if length % size
    ]


def _way_notes(
    built: Built, assignment: Assignment, axis: int, name: str, size: int, cp: ContextParallelism | None
) -> list[str]:
    """Of attention that does not run as `cp=` asks."""
    nodes = [node for node in built.rules if _attends(node)]
    if cp is not None and not nodes:
        return [
            f"cp={cp!r}: the program has no attention operator (scaled_dot_product_attention); products are split over "
            f"{name}={size} as costs say"
        ]
    others: dict[str, None] = {}
    whys: dict[str, None] = {}
    for node in nodes if cp is not None else ():
        found = _way(built, assignment, node, axis)
        if found != cp:
            others[found] = None
            whys[_why_not(built.rules[node], size, cp)] = None
    if not others:
        return []
    number = sum(_way(built, assignment, node, axis) != cp for node in nodes)
    return [
        f"cp={cp!r}: {number} of {len(nodes)} attentions do otherwise over {name}={size} ({', '.join(others)}): "
        + "; ".join(whys)
    ]


def _way(built: Built, assignment: Assignment, node: fx.Node, axis: int) -> str:
    """What an attention does over an axis of context parallelism."""
    picked = _picked(built, assignment, node, axis)
    if picked == "s":
        index = built.operators[node]
        strategies = built.variables[index].strategies
        assert strategies is not None
        return "ring" if strategies.implementation(int(assignment[index])) == "ring" else "gather"
    return {"h": "ulysses", "g": "ulysses", "b": "samples apart", None: "whole"}.get(picked, f"split by {picked}")


def _why_not(rule: Rule, size: int, cp: ContextParallelism | None) -> str:
    heads, groups, length = (rule.sizes.get(name, 1) for name in ("h", "g", "s"))
    if cp == "ulysses":
        if heads % size and groups % size:
            return f"{heads * groups} heads of queries, {heads} of keys do not divide by {size}"
        return "constraints ask for another split"
    if length % size:
        return f"a sequence of {length} does not divide by {size}"
    if cp == "ring":
        return "a ring takes keys as long as queries"
    return "constraints ask for another split"


def _picked(built: Built, assignment: Assignment, node: fx.Node, axis: int) -> str | None:
    """The name that an operator splits over an axis; None if it is replicated."""
    index = built.operators[node]
    strategies = built.variables[index].strategies
    assert strategies is not None
    return strategies.axes[int(assignment[index])][axis]
