"""The rank whose program a step is priced by: the one with most to do, where ranks differ.

Blocks of uneven dims are largest on the first rank. A causal ring of neighbouring blocks gives most to the last one,
which sees all keys; in zigzag order all ranks see as many.
"""

from __future__ import annotations

import math

from autopar.graphs.operator_names import is_causal
from autopar.layouts.placement import Mesh, Shard
from autopar.plans.plan_value import RING, PlanValue
from autopar.program import Program


def busiest_place(plan: PlanValue, mesh: Mesh, program: Program) -> int:
    """The number of a rank on `mesh`, row-major."""
    nodes = {node.meta.get("operator"): node for node in program.graph.nodes if node.op == "call_function"}
    last = [False] * len(mesh.shape)
    for name, chosen in plan.operators.items():
        if chosen.implementation != RING or name not in nodes or not is_causal(nodes[name]):
            continue
        for axis, (split, placed) in enumerate(zip(chosen.axes, chosen.inputs[0], strict=True)):
            last[axis] |= split == "s" and not (isinstance(placed, Shard) and placed.zigzag)
    strides = [math.prod(mesh.shape[axis + 1 :]) for axis in range(len(mesh.shape))]
    return sum(stride * (size - 1) for stride, size, is_last in zip(strides, mesh.shape, last, strict=True) if is_last)
