"""Moments: the bytes that the lowered program of one rank really holds while each operator runs.

    [1.2e9, ..., 7.9e9, ..., 3.1e9]        one per position of `Lifetimes`: operators of forward, of backward, optimizer

The largest is the predicted peak. What a moment holds beyond its memory row (`memory_rows.py`) are buffers of
collectives, less the copies that the row counts and this plan shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from torch import fx

from autopar.graphs.forward_backward import Partition
from autopar.graphs.live_ranges import bytes_over_time, memory_events
from autopar.passes.stages.once_per_step import PREPARED
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.problem.prices import Floats

BACKWARD = "/bwd"
"""How the names of the operators of backward end."""


def measured_bytes(partition: Partition, lifetimes: Lifetimes, states: float, step_buffers: float) -> Floats:
    """(positions,) bytes at the fullest node of every operator, and during the optimizer's step. states: bytes of
    parameters and optimizer state, which stay, with what is gathered once per step. NaN for operators without a node of
    their own."""
    own = [live for live in memory_events(partition) if not live.name.startswith(PREPARED)]
    over_time = bytes_over_time(own)
    found = np.full(lifetimes.end + 1, np.nan)
    found[lifetimes.end] = states + step_buffers + (float(over_time[-1]) if len(over_time) else 0.0)
    position_of = {str(node.meta["operator"]): position for node, position in lifetimes.position.items()}
    for place, held in zip(_places(partition, position_of), over_time.tolist(), strict=False):
        found[place] = np.fmax(found[place], states + held)
    return found


def transient_bytes(measured: Floats, modelled: Floats) -> Floats:
    """What moments hold beyond what the model says of them, `modelled`, as memory rows take it; 0 for operators without
    a node of their own. Rows therefore count what a kernel of ours keeps to itself: plans that use this room up as well
    have none left to overlap communication (Llama-3-8B within 40 GB on 256 H100: 1.29 s a step instead of 1.02)."""
    return np.where(np.isnan(measured), 0.0, measured - modelled)


def completed_bytes(measured: Floats, modelled: Floats) -> Floats:
    """`measured_bytes` with what operators without a node of their own hold: what the model says of them, `modelled`,
    but no more than the fuller of the moments around them, since a kernel computes several operators in one node and
    what they would hand each other is not held. Both (positions,), the last one measured."""
    missing = np.isnan(measured)
    places = np.arange(len(measured))
    before = np.maximum.accumulate(np.where(missing, -1, places))
    behind = np.minimum.accumulate(np.where(missing, len(measured), places)[::-1])[::-1]
    around = np.fmax(np.where(before < 0, np.nan, measured[before]), measured[behind])
    return np.where(missing, np.minimum(modelled, around), measured)


def _places(partition: Partition, position_of: Mapping[str, int]) -> Iterator[int]:
    """The position to which every node of forward, then of backward, belongs: its own operator's; what is moved, looked
    at, taken of forward or made again belongs to the operator that comes next, behind the last one to that."""
    graphs = [("forward", partition.forward)]
    if partition.backward is not None:
        graphs.append(("backward", partition.backward))
    for phase, module in graphs:
        nodes = [node for node in module.graph.nodes if node.op != "output"]
        own = [_own_position(node, phase, position_of) for node in nodes]
        following, places = next((place for place in reversed(own) if place is not None), 0), list[int]()
        for place in reversed(own):
            following = following if place is None else place
            places.append(following)
        yield from reversed(places)


def _own_position(node: fx.Node, phase: str, position_of: Mapping[str, int]) -> int | None:
    operator = str(node.meta.get("operator", ""))
    is_copy = node.meta.get("redistributes") is not None
    again = phase == "backward" and not operator.endswith(BACKWARD)
    return None if is_copy or again or node.op != "call_function" else position_of.get(operator)
