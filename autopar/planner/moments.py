"""Moments: the bytes that the lowered program of one rank really holds while each phase is in each segment.

    {"forward 0": 1.2e9, ..., "backward 3": 7.9e9, ..., "optimizer": 3.1e9}

The largest is the predicted peak. What a moment holds beyond its memory row (`memory_rows.py`) are the transients of
this plan: gathered weights, buffers of collectives, gradients of activations.
"""

from __future__ import annotations

from torch import fx

from autopar.cost_models.memory import bytes_over_time
from autopar.passes.partition import Partition, memory_events
from autopar.planner.memory_rows import OPTIMIZER, Moment, moment
from autopar.planner.segments import Segments

BACKWARD = "/bwd"
"""How the names of the operators of backward end."""


def measured_bytes(partition: Partition, segments: Segments, states: float) -> dict[Moment, float]:
    """Bytes at the fullest node of every moment. states: bytes of parameters and optimizer state, which stay."""
    over_time = bytes_over_time(memory_events(partition))
    names = [("forward", _operator(node)) for node in _nodes(partition.forward)]
    names += _names_in_backward(_nodes(partition.backward)) if partition.backward is not None else []
    found: dict[Moment, float] = {}
    for index, ((phase, _), segment) in enumerate(zip(names, segments.along(names), strict=True)):
        name = moment(phase, segment)
        held = float(over_time[index]) if index < len(over_time) else 0.0
        found[name] = max(found.get(name, states), states + held)
    found[OPTIMIZER] = states + (float(over_time[-1]) if len(over_time) else 0.0)
    return found


def _nodes(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op != "output"]


def _operator(node: fx.Node) -> str:
    return str(node.meta.get("operator", ""))


def _names_in_backward(nodes: list[fx.Node]) -> list[tuple[str, str]]:
    """What backward makes again, gathers or takes of forward belongs to the operator of backward that comes next."""
    names, following = [], ""
    for node in reversed(nodes):
        following = _operator(node) if _operator(node).endswith(BACKWARD) else following
        names.append(("backward", following))
    return names[::-1]
