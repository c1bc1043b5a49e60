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


def predict_timeline(program: Program, built: Built, assignment: NDArray[np.int64], prices: Prices) -> Timeline:
    """One training step of one rank: operators in program order, redistributions before their first reader."""
    actions: list[Action] = []
    producer: dict[int, int] = {}
    arrived: dict[tuple[int, int, str], int] = {}
    incoming: dict[int, list[tuple[int, float, int]]] = {}
    for edge in built.problem.edges:
        seconds = float(edge.costs[assignment[edge.source], assignment[edge.target]])
        incoming.setdefault(edge.target, []).append((edge.source, seconds, round(seconds * 1e12)))
    order = _schedule(built)
    for index in order:
        variable = built.variables[index]
        depends: list[int] = []
        for source, seconds, signature in incoming.get(index, ()):
            ready = (producer[source],) if source in producer else ()
            if seconds < 1e-7:
                depends.extend(ready)
                continue
            key = (
                source,
                signature,
                str(variable.phase if variable.kind == "copy" else variable.node.meta.get("phase")),
            )
            if key not in arrived or built.variables[source].kind != "copy":
                name = f"{built.variables[source].name} -> {variable.name}"
                actions.append(Action(name, COMPUTE_STREAM, seconds, ready, communication=True))
                arrived[key] = len(actions) - 1
            depends.append(arrived[key])
        actions.append(
            Action(variable.name, COMPUTE_STREAM, _seconds(built, index, assignment), tuple(sorted(set(depends))))
        )
        producer[index] = len(actions) - 1
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
