"""Step bytes: what a rank without stages holds at every moment of a step, of whose parts some make more than others.

    every part        states, what was gathered once, whole totals of gradients, and what lives in the part
    first forward     the same, but that it gathers while it runs
    last backward     the same, but that a total ends where it is summed, and what is gathered ends with the part
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autopar.graphs.forward_backward import Partition
from autopar.graphs.live_ranges import memory_events
from autopar.graphs.node_values import node_bytes
from autopar.passes.lowering.stage import LoweredStage
from autopar.passes.stages.once_per_step import Prepared
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.lowered_bytes import measured_bytes
from autopar.planner.problem.prices import Floats
from autopar.program import returned_values


def step_bytes(stage: LoweredStage, lifetimes: Lifetimes, states: float, step_buffers: float) -> Floats:
    """As `measured_bytes`, over all parts of a step. stage: with its collectives started early, or one by one; states:
    bytes that stay, with one total per gradient where gradients are added up."""
    parts = stage.partition
    if stage.first is None and stage.last is None:
        return measured_bytes(parts, lifetimes, states, step_buffers)
    gathered, totals, complete = _once(stage)
    turn = sum(node.meta["phase"] != "backward" for node in lifetimes.in_order)
    found = measured_bytes(parts, lifetimes, states + gathered + totals - complete, step_buffers)
    if stage.first is not None:
        alone = Partition(forward=stage.first, backward=None, saved=(), parameters=parts.parameters)
        first = measured_bytes(alone, lifetimes, states + totals - complete, step_buffers)
        found[:turn] = np.fmax(found[:turn], first[:turn])
    if stage.last is not None:
        ending = replace(parts, backward=stage.last)
        last = measured_bytes(ending, lifetimes, states - complete + gathered, step_buffers)
        found[turn:-1] = np.fmax(found[turn:-1], last[turn:-1])
        found[-1] = last[-1]
    found[-1] -= gathered
    return found


def _once(stage: LoweredStage) -> tuple[float, float, float]:
    """Bytes of what is gathered once, of the totals of gradients, and of these once they are complete."""
    gathered = 0.0 if stage.prepared is None else math.fsum(prepared_bytes(stage.prepared).values())
    if stage.last is None:
        return gathered, 0.0, 0.0
    complete = sum(node_bytes(node) for node in returned_values(stage.last.graph))
    return gathered, math.fsum(total_bytes(stage).values()), float(complete)


def prepared_bytes(prepared: Prepared) -> Mapping[str, float]:
    """Operator or parameter -> bytes of what is gathered once per step and stays for it."""
    graph, parameters = prepared.prepare, frozenset(prepared.parameters)
    alone = Partition(forward=graph, backward=None, saved=(), parameters=parameters)
    nodes = {node.name: node for node in graph.graph.nodes}
    end = len(nodes) - 1
    found: dict[str, float] = {}
    for live in memory_events(alone):  # views of what is gathered have no bytes of their own
        if live.last_index == end:
            name = str(nodes[live.name].meta.get("operator", live.name))
            found[name] = found.get(name, 0.0) + float(live.bytes)
    return found


def total_bytes(stage: LoweredStage) -> Mapping[str, float]:
    """Parameter -> bytes of the total of its gradient, whole where the stage reduces it once per step."""
    gradients = [output.name for output in stage.program.outputs if output.role == "gradient"]
    backward = stage.unreduced if stage.late is None else stage.late.unreduced
    if backward is None:
        return {}
    values = returned_values(backward.graph)
    return {gradients[index]: float(node_bytes(values[index])) for index in stage.totals}
