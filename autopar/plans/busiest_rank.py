"""The rank whose program a step is priced by: the one with most to do, where ranks differ.

Blocks of uneven dims are largest on the first rank. A causal ring of neighbouring blocks gives most to the last one,
which sees all keys, or a whole window; in zigzag order all ranks see as many. Of a window on both sides ranks in the
middle see most.
"""

from __future__ import annotations

import math

from autopar.graphs.operator_names import is_causal, window_of
from autopar.layouts.placement import Mesh, Shard
from autopar.plans.plan_value import RING, PlanValue
from autopar.program import Program


def busiest_place(plan: PlanValue, mesh: Mesh, program: Program) -> int:
    """The number of a rank on `mesh`, row-major."""
    nodes = {node.meta.get("operator"): node for node in program.graph.nodes if node.op == "call_function"}
    places = [0] * len(mesh.shape)
    for name, chosen in plan.operators.items():
        if chosen.implementation != RING or name not in nodes:
            continue
        is_last, is_between = is_causal(nodes[name]), window_of(nodes[name]) is not None
        if not (is_last or is_between):
            continue
        for axis, (split, placed) in enumerate(zip(chosen.axes, chosen.inputs[0], strict=True)):
            if split == "s" and not (isinstance(placed, Shard) and placed.zigzag):
                size = mesh.shape[axis]
                places[axis] = max(places[axis], size - 1 if is_last else size // 2)
    strides = [math.prod(mesh.shape[axis + 1 :]) for axis in range(len(mesh.shape))]
    return sum(stride * place for stride, place in zip(strides, places, strict=True))
