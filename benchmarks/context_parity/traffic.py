"""What context parallelism moves in models that mix a sequence by scans, convolutions and products.

    python -m benchmarks.context_parity.traffic --ranks 4 --tokens 2048
    python -m benchmarks.context_parity.traffic --model mamba2 --operators

Plans of `FAMILIES` under `dims={"cp": ranks}`; nothing runs. A row counts the operators that see the sequence by how
the axis splits them (along the sequence; along another dim; not at all) and the bytes that a rank receives in one step,
without the sums of parameter gradients, which every axis of data needs. "gathered" are those that it would receive if
the operators which exchange rows or states gathered what they read instead. --operators: those that lose the sequence.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from rich.console import Console
from torch import fx

from autopar.capture import capture
from autopar.graphs.collective_nodes import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Layout, Shard
from autopar.planner.planning import make_plan
from autopar.planner.problem.factorisation import Factorisation, Value, sequence_class, shape_of, value_of
from autopar.planner.problem.graph_operators import operators
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.request import Request
from autopar.request.mesh_axes import CONTEXT_AXES
from autopar.rules.alternatives import rule_as
from autopar.rules.engine import tensor_operands
from benchmarks.context_parity.sequence_models import FAMILIES
from tests.passes.lowered_programs import lower

MOST_TOKENS = {"rwkv": 32, "evoformer": 128}
"""Of models that loop over them, or hold all pairs of them."""
EXCHANGES = ("moved_rows", "prefix", "split_convolution")
RANK = 1
"""The rank whose collectives are counted: one with neighbours on both sides."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """of_sequence, elsewhere, whole: operators that see the sequence, by how cp splits them; lost: the last two, name
    of the operator -> how often; ways: implementation -> how often; received, gathered: bytes."""

    of_sequence: int
    elsewhere: int
    whole: int
    lost: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    gathered: float = 0.0


def planned(program: Program, ranks: int) -> Plan:
    """The plan of one program under an axis cp."""
    request = Request(
        cluster=Cluster.parse(f"{ranks} cpu"), mode="fast", with_baselines=False, dims={"cp": ranks}
    )
    return make_plan(program, request)


def traffic_of(program: Program, plan: Plan) -> Traffic:
    """What the plan does with the sequence."""
    axes = [axis for axis, name in enumerate(plan.mesh.axis_names) if name in CONTEXT_AXES]
    ranks, seen = math.prod(plan.mesh.shape[axis] for axis in axes), Factorisation(program)
    sequence = sequence_class(program, seen)
    counts: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    ways: Counter[str] = Counter()
    gathered = 0.0
    for node in operators(program):
        chosen = plan.operators[node.meta["operator"]]
        tensors = _tensors(node, chosen.inputs, chosen.outputs)
        rows = [(value, layout) for value, layout in tensors if _dims_of(value, seen, sequence)]
        if not rows:
            continue
        along = any(
            isinstance(place := layout[axis], Shard) and place.dim in _dims_of(value, seen, sequence)
            for value, layout in rows
            for axis in axes
        )
        picked = [name for axis in axes if (name := chosen.axes[axis]) is not None]
        kind = "of_sequence" if along else "elsewhere" if picked else "whole"
        counts[kind] += 1
        if not along:
            lost[f"{kind}: {node.target}"] += 1
        rule = rule_as(node, chosen.implementation)
        for way in {rule.implementations[name]: None for name in picked if rule and name in rule.implementations}:
            ways[way] += 1
            if way.startswith(EXCHANGES) and along:
                read = [value for value, _ in tensors[: len(chosen.inputs)] if _dims_of(value, seen, sequence)]
                gathered += sum(map(_bytes, read)) * (ranks - 1) / ranks
    return Traffic(
        of_sequence=counts["of_sequence"], elsewhere=counts["elsewhere"], whole=counts["whole"],
        lost=lost, ways=ways, received=received_bytes(program, plan), gathered=gathered,
    )  # fmt: skip


def received_bytes(program: Program, plan: Plan) -> Counter[str]:
    """Collective -> bytes that one rank receives in a step, without gradients of parameters."""
    lowered = lower(program, plan, RANK)
    found: Counter[str] = Counter()
    for node in lowered.graph.nodes:
        if node.op != "call_function" or "group_axes" not in node.meta or _ends_outside(node):
            continue
        group = [plan.mesh.axis_names.index(name) for name in node.meta["group_axes"]]
        ranks, position = 1, 0
        for axis in group:
            ranks *= plan.mesh.shape[axis]
            position = position * plan.mesh.shape[axis] + plan.mesh.coordinate(RANK)[axis]
        size = math.prod(node.meta["local_shape"]) * node.meta["dtype"].itemsize
        rest = (ranks - 1) / ranks
        if node.target is ALL_GATHER:
            received = size * rest
        elif node.target is ALL_REDUCE:
            received = 2 * size * rest
        elif node.target is REDUCE_SCATTER:
            received = size * (ranks - 1)
        else:  # all_to_all_single(rows, received, sent, group)
            rows: list[int] = list(node.args[1])
            received = size * (1 - rows[position] / max(1, sum(rows)))
        found[str(node.target).split(".")[1]] += round(received)
    return found


def _ends_outside(node: fx.Node) -> bool:
    """Whether the result is only returned, as the gradient of a parameter is."""
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user.op == "output":
                continue
            if len(user.all_input_nodes) > 1 or _numel(user) != _numel(user.all_input_nodes[0]):
                return False
            pending.append(user)
    return True


def _numel(node: fx.Node) -> int:
    shape = node.meta.get("local_shape")
    return math.prod(shape) if isinstance(shape, tuple) and all(isinstance(n, int) for n in shape) else -1


def _tensors(
    node: fx.Node, inputs: tuple[Layout, ...], outputs: tuple[Layout, ...]
) -> list[tuple[Value, Layout]]:
    found = [(value_of(one), layout) for one, layout in zip(tensor_operands(node), inputs, strict=True)]
    value = node.meta["val"]
    values = value if isinstance(value, tuple | list) else (value,)
    made = [(node, index) for index in range(len(values))]
    return found + [
        (one, layout)
        for one, layout, tensor in zip(made, outputs, values, strict=True)
        if isinstance(tensor, torch.Tensor)
    ]


def _dims_of(value: Value, seen: Factorisation, sequence: object) -> set[int]:
    """The dims of a tensor that hold the sequence."""
    return {
        dim
        for dim in range(len(shape_of(*value)))
        for index in range(len(seen.atoms(value, dim)))
        if seen.atom_class(value, dim, index) == sequence
    }


def _bytes(value: Value) -> int:
    held = value[0].meta["val"]
    tensor = held[value[1]] if isinstance(held, tuple | list) else held
    return int(tensor.numel()) * int(tensor.dtype.itemsize)


def main() -> None:
    """Print a row per family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(FAMILIES), help="of these only")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--operators", action="store_true", help="print the operators that lose the sequence")
    asked = parser.parse_args()
    console = Console(width=180)
    console.print("| family | operators along the sequence, another dim, whole | ways | received MB | gathered MB |")
    console.print("|---|---|---|---|---|")
    for name in asked.model or FAMILIES:
        model, inputs = FAMILIES[name](min(asked.tokens, MOST_TOKENS.get(name, asked.tokens)))
        program = capture(model, (), inputs)
        found = traffic_of(program, planned(program, asked.ranks))
        split = f"{found.of_sequence}, {found.elsewhere}, {found.whole}"
        ways = ", ".join(f"{way} {count}" for way, count in sorted(found.ways.items()))
        received = f"{sum(found.received.values()) / 1e6:.3f}"
        console.print(f"| {name} | {split} | {ways} | {received} | {found.gathered / 1e6:.3f} |", highlight=False)
        if asked.operators:
            console.print(f"  {dict(found.received)}", highlight=False)
            for operator, count in found.lost.most_common():
                console.print(f"  {count} {operator}", highlight=False)


if __name__ == "__main__":
    main()
