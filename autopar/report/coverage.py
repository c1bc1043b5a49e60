"""Coverage: which operators of a model have no sharding rule, how much of the model they are, what that costs.

An operator without a rule runs whole on every device. Its row says its share of the FLOPs (formulas of torch's flop
counter) and of the bytes that operators read and write, its seconds on one device, and the seconds that a split over
all devices would save: that is what a rule is worth at most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from autopar.cost_models.operator_costs import operator_seconds
from autopar.graphs.kernel_groups import Traffic, bytes_moved
from autopar.graphs.operator_names import operator_kind
from autopar.hardware.cluster import Cluster, refuse_mixed
from autopar.planner.problem.graph_operators import operators, tensor_dtype, value_bytes
from autopar.program import Program
from autopar.rules.call import tensor_operands
from autopar.rules.engine import rule_for

COLUMNS = ("operator", "calls", "example", "FLOPs", "bytes", "whole on each", "a rule saves")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """All calls of one operator without a rule. Shares are of the whole model; seconds are per step and device."""

    operator: str
    calls: int
    example: str
    flops_share: float
    bytes_share: float
    replicated_seconds: float
    saved_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """operators, calls: of the whole model; gaps: dearest first."""

    operators: int
    calls: int
    gaps: tuple[Gap, ...]


def coverage(program: Program, cluster: Cluster) -> Coverage:
    """What the operators without a rule cost when `program` runs on `cluster`, of one kind of device."""
    refuse_mixed(cluster, "the price of operators without a rule")
    nodes = operators(program)
    flops = {node: _flops(node) for node in nodes}
    moved = {node: _bytes_moved(node) for node in nodes}
    without: dict[str, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if rule_for(node) is None:
            without[str(node.target)].append(node)
    gaps = []
    for target, calls in without.items():
        seconds = sum(_seconds(node, flops[node], moved[node], cluster) for node in calls)
        gaps.append(
            Gap(
                operator=target,
                calls=len(calls),
                example=str(calls[0].meta["operator"]),
                flops_share=_share(sum(flops[n] for n in calls), sum(flops.values())),
                bytes_share=_share(sum(moved[n] for n in calls), sum(moved.values())),
                replicated_seconds=seconds,
                saved_seconds=seconds * (1 - 1 / cluster.num_devices),
            )
        )
    gaps.sort(key=lambda gap: (-gap.saved_seconds, gap.operator))
    return Coverage(operators=len({str(n.target) for n in nodes}), calls=len(nodes), gaps=tuple(gaps))


def coverage_rows(found: Coverage) -> list[Sequence[str]]:
    """Cells of the table, under `COLUMNS`."""
    return [
        (
            gap.operator,
            str(gap.calls),
            gap.example,
            f"{gap.flops_share:.1%}",
            f"{gap.bytes_share:.1%}",
            f"{gap.replicated_seconds * 1e3:.3f} ms",
            f"{gap.saved_seconds * 1e3:.3f} ms",
        )
        for gap in found.gaps
    ]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _seconds(node: fx.Node, flops: float, moved: float, cluster: Cluster) -> float:
    operands = tensor_operands(node)
    dtype = tensor_dtype(operands[0]) if operands else torch.float32
    wide = dtype if dtype.is_floating_point else torch.float32
    name = str(wide).removeprefix("torch.")
    kind = "matmul" if flops else operator_kind(node.target)
    return float(operator_seconds(cluster.device, flops=flops, bytes_moved=moved, dtype=name, kind=kind))


def _flops(node: fx.Node) -> float:
    """FLOPs of one call, from its rule, else from torch's formula for it, else 0."""
    rule = rule_for(node)
    if rule is not None:
        return rule.flops
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0.0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return float(formula(*args, **kwargs, out_val=node.meta["val"]))


def _bytes_moved(node: fx.Node) -> float:
    value = node.meta["val"]
    results = len(value) if isinstance(value, tuple | list) else 1
    alone = Traffic(tuple(dict.fromkeys(tensor_operands(node))), tuple(range(results)))
    return float(sum(bytes_moved(node, alone, value_bytes, partial(value_bytes, node))))
