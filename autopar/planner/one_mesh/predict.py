"""Predict: play the chosen plan through the simulator; separate from the certified objective.

The objective pays every edge; the program pays a redistribution once per (tensor, phase, target), and readers of one
shared copy may ask for the same layout. `predict_timeline` plays the tables, with everything on one stream;
`choose_issue` plays the lowered program, whose collectives run beside what does not need them
(`passes/overlap/early_starts.py`), with the bucket sizes and chunks that make it shortest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.cost_models.simulator import COMPUTE_STREAM, Action, Timeline, simulate
from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import Device
from autopar.passes.lowering.chain import resumed, start_early
from autopar.passes.lowering.stage import LoweredStage, LoweredStep
from autopar.planner.one_mesh.bucket_sizes import CHUNKS, Issue, issues
from autopar.planner.problem.build import Built
from autopar.planner.problem.graph_operators import base_of
from autopar.planner.problem.prices import Floats, Prices
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
    if seconds_of_views := dispatch_seconds(program.graph, prices.cluster.device):
        actions.append(Action("views", COMPUTE_STREAM, seconds_of_views))
    return simulate(actions)


def dispatch_seconds(graph: fx.Graph, device: Device) -> float:
    """Seconds of the views of a graph: on CPUs, eager dispatch of one costs what any small operator costs."""
    if device.kind != "cpu":
        return 0.0
    views = sum(1 for node in graph.nodes if node.op == "call_function" and base_of(node)[1])
    return device.launch_seconds * views


def choose_issue(
    step: LoweredStep,
    cluster: Cluster,
    measure: Callable[[LoweredStage], Floats],
    budget_bytes: float,
    least: Floats,
) -> tuple[Issue, Floats]:
    """How the collectives of a lowered step are issued, and what `measure` says of that: the fastest bucket
    sizes and chunks whose bytes stay within the budget; one by one where none do, of which it says `least`. step: up to
    `add_up_parts`."""
    plan, as_lowered = step.plan, one_by_one(step)
    # No chunks on CPUs: a host's exchanges take the processor that the product beside them needs. GPT under tensor
    # parallelism, 1 Gbit/s, half a core per rank: 1.13 s whole, 1.29 s in 2 chunks, 1.39 s in 4
    chunks = () if cluster.device.kind == "cpu" else CHUNKS
    fitting: list[tuple[Issue, Floats]] = []

    def fits(issue: Issue) -> bool:
        measured = measure(resumed(step, issue.of_plan(plan), until=start_early).only)
        if float(np.nanmax(measured)) > budget_bytes:
            return False
        fitting.append((issue, measured))
        return True

    options = issues(
        as_lowered.runs,
        cluster=cluster,
        mesh=plan.mesh,
        backend=plan.kernel_backend,
        chunks=chunks,
        fits=fits,
    )
    for issue in options:
        if issue.bucket_bytes is None:
            return issue, least
        known = [found for found in fitting if found[0] is issue]
        if known or fits(issue):
            return (known or fitting)[-1]
    raise AssertionError("one by one comes last")


def one_by_one(step: LoweredStep) -> LoweredStage:
    """The graphs of a lowered step whose collectives and copies are awaited where they start: what takes the
    least memory. step: up to `add_up_parts`."""
    return resumed(step, replace(step.plan, bucket_bytes=None, copy_ahead_bytes=0.0), until=start_early).only


def _seconds(built: Built, index: int, assignment: NDArray[np.int64]) -> float:
    return float(built.variables[index].costs[assignment[index]])


def _schedule(built: Built) -> list[int]:
    """Variables in execution order; a parameter with a gradient acts again at the end, when that is reduced."""
    waits = {edge.target for edge in built.problem.edges if built.variables[edge.target].kind == "parameter"}
    return [i for i in range(len(built.variables)) if i not in waits] + sorted(waits)
