"""Copies ahead: how many bytes are brought from the host before they are read, by playing the lowered step.

    at once      mm | copy w1 1.2 ms | mm | copy w2 1.2 ms | mm        every copy stops the rank
    64 MiB       mm | mm | mm   beside   copy w1, copy w2              and takes 64 MiB of the device

The smallest size is tried first, and each one that is faster is taken as long as it fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import fx

from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.cost_models.program_costs import program_actions
from autopar.cost_models.program_timeline import issued, wait_positions
from autopar.cost_models.simulator import Interference, Timeline, simulate
from autopar.graphs.copy_nodes import copy_direction
from autopar.graphs.forward_backward import Partition
from autopar.graphs.node_values import describe_values, node_bytes
from autopar.hardware.cluster import Cluster
from autopar.passes.lowering.chain import resumed, start_early
from autopar.passes.lowering.stage import LoweredStage, LoweredStep
from autopar.planner.one_mesh.bucket_sizes import Issue
from autopar.planner.problem.prices import Floats
from autopar.plans.parallel_plan import Plan

TIMES = (1, 2, 4, 8, 16)
"""The sizes that are tried, of the largest copy."""


def with_copies_ahead(
    step: LoweredStep, issue: Issue, cluster: Cluster, measure: Callable[[LoweredStage], Floats], budget_bytes: float
) -> tuple[Issue, Floats]:
    """How a lowered step copies beside how it issues its collectives, and the bytes of its moments. step: up to
    `add_up_parts`; measure: bytes of its stage at every moment."""
    prices = KernelPrices(device=cluster.device)
    largest = _largest(step.only.partition)
    best: tuple[Issue, Floats] | None = None
    for ahead in (0.0, *(float(times * largest) for times in TIMES)):
        tried = replace(issue, ahead_bytes=ahead)
        stage = resumed(step, tried.of_plan(step.plan), until=start_early).only
        measured = measure(stage)
        if best is not None and float(np.nanmax(measured)) > budget_bytes:
            break
        tried = replace(tried, passes=_played(stage, step.plan, cluster, prices))
        if best is None or tried.seconds < best[0].seconds:
            best = tried, measured
    assert best is not None
    return best


def _largest(partition: Partition) -> int:
    nodes = [node for graph in partition.graphs for node in graph.graph.nodes]
    return max((node_bytes(node) for node in nodes if copy_direction(node) is not None), default=0)


def _played(stage: LoweredStage, plan: Plan, cluster: Cluster, prices: KernelPrices) -> tuple[Timeline, ...]:
    return tuple(_play(module.graph, phase, plan, cluster, prices) for phase, module, _ in stage.runs)


def _play(graph: fx.Graph, phase: str, plan: Plan, cluster: Cluster, prices: KernelPrices) -> Timeline:
    nodes = list(graph.nodes)
    describe_values(nodes)
    actions = program_actions(
        graph, phase, cluster=cluster, mesh=plan.mesh, backend=plan.kernel_backend, prices=prices, segment_of=str
    )
    return simulate(issued(actions, wait_positions(nodes)), Interference(compute=cluster.overlap_slowdown))
