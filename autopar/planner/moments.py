"""Moments: the bytes that the lowered program of one rank really holds while each phase is in each segment.

    {"forward 0": 1.2e9, ..., "backward 3": 7.9e9, ..., "optimizer": 3.1e9}

The largest is the predicted peak. What a moment holds beyond its memory row (`memory_rows.py`) are the transients of
this plan: gathered weights, buffers of collectives, gradients of activations.
"""

from __future__ import annotations

from autopar.cost_models.memory import bytes_over_time
from autopar.passes.partition import Partition, memory_events
from autopar.planner.memory_rows import OPTIMIZER, Moment, moment
from autopar.planner.segments import Segments


def measured_bytes(partition: Partition, segments: Segments, states: float) -> dict[Moment, float]:
    """Bytes at the fullest node of every moment. states: bytes of parameters and optimizer state, which stay."""
    over_time = bytes_over_time(memory_events(partition))
    graphs = [("forward", partition.forward), ("backward", partition.backward)]
    names = [
        (phase, str(node.meta.get("operator", "")))
        for phase, module in graphs
        if module is not None
        for node in module.graph.nodes
        if node.op != "output"
    ]
    found: dict[Moment, float] = {}
    for index, ((phase, _), segment) in enumerate(zip(names, segments.along(names), strict=True)):
        name = moment(phase, segment)
        held = float(over_time[index]) if index < len(over_time) else 0.0
        found[name] = max(found.get(name, states), states + held)
    found[OPTIMIZER] = states + (float(over_time[-1]) if len(over_time) else 0.0)
    return found
