"""Predict: play the chosen plan through the simulator; separate from the certified objective.

The objective pays every edge; the program pays a redistribution once per (tensor, phase, target), and readers of one
shared copy may ask for the same layout. The lowering starts a collective in front of its first reader and waits for
it at once, on NCCL as on gloo, so nothing runs beside it: all actions are on one stream.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.simulator import COMPUTE_STREAM, Action, Timeline, simulate
from autopar.planner.build import Built
from autopar.planner.operators import base_of
from autopar.planner.prices import Prices
from autopar.program import Program

STILL_SECONDS = 1e-7
"""Edges below this move nothing: they cost tie-breaks (1e-8 s each) at most."""


def predict_timeline(program: Program, built: Built, assignment: NDArray[np.int64], prices: Prices) -> Timeline:
    """One training step of one rank: operators in program order, redistributions before their first reader."""
    actions: list[Action] = []
    arrived: set[tuple[int, float]] = set()
    incoming: dict[int, list[tuple[int, float]]] = {}
    for edge in built.problem.edges:
        seconds = float(edge.costs[assignment[edge.source], assignment[edge.target]])
        if seconds >= STILL_SECONDS:
            incoming.setdefault(edge.target, []).append((edge.source, seconds))
    for index in _schedule(built):
        for source, seconds in incoming.get(index, ()):
            if built.variables[source].kind == "copy" and (source, seconds) in arrived:
                continue
            arrived.add((source, seconds))
            name = f"{built.variables[source].name} -> {built.variables[index].name}"
            actions.append(Action(name, COMPUTE_STREAM, seconds, communication=True))
        actions.append(Action(built.variables[index].name, COMPUTE_STREAM, _seconds(built, index, assignment)))
    views = sum(1 for node in program.graph.nodes if node.op == "call_function" and base_of(node)[1])
    if prices.cluster.device.kind == "cpu":  # eager dispatch of views costs what any small operator costs
        actions.append(Action("views", COMPUTE_STREAM, views * prices.cluster.device.launch_seconds))
    return simulate(actions)


def _seconds(built: Built, index: int, assignment: NDArray[np.int64]) -> float:
    return float(built.variables[index].costs[assignment[index]])


def _schedule(built: Built) -> list[int]:
    """Variables in execution order; a parameter with a gradient acts again at the end, when that is reduced."""
    waits = {edge.target for edge in built.problem.edges if built.variables[edge.target].kind == "parameter"}
    return [i for i in range(len(built.variables)) if i not in waits] + sorted(waits)
