"""One sub-mesh of a pipeline: its share of the cluster, the plan of the whole program on it, and its block table.

    "2x8 H100-SXM", pp=4      4 ranks groups of 4 neighbouring devices: a cluster of one node of 4
    "2x8 H100-SXM", pp=2      a node each: the axis "pp" crosses the network, all others stay inside

The program of one micro-batch is planned on the sub-mesh as if it had the memory of all of them; the stage search then
gives every stage its share. Where no cut fits, the program is planned again with less memory, so that parameters are
split further.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopar.cost_models.collective_costs import collective_seconds
from autopar.cost_models.copy_costs import copy_rate
from autopar.graphs.copy_nodes import Direction
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import between_groups
from autopar.layouts.placement import Mesh
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.one_mesh.mesh_plan import Candidate, price
from autopar.planner.one_mesh.query import Query
from autopar.planner.pipelines.block_costs import Solved, SolvedWay, block_table, ways_of, weight_operators
from autopar.planner.pipelines.block_table import HOST_MODES, MODES, RECOMPUTE_OF, BlockTable
from autopar.planner.pipelines.runs import Runs
from autopar.planner.problem.prices import Prices
from autopar.plans.plan_value import PIPELINE_AXIS
from autopar.request.offload import ACTIVATIONS

WAYS: tuple[Direction, Direction] = ("to_host", "from_host")


def whole_mesh(num_groups: int, mesh: Mesh) -> Mesh:
    """The mesh of a plan with stages: "pp" in front of the axes of a sub-mesh."""
    return Mesh((PIPELINE_AXIS, *mesh.axis_names), (num_groups, *mesh.shape))


def solved_on(query: Query, candidate: Candidate, lifetimes: Lifetimes) -> Solved:
    """The plan of a sub-mesh as labels of its plain problem, at the prices of one micro-batch."""
    built = price(replace(query, micro=None), candidate.mesh)
    sizes = np.array([len(costs) for costs in built.problem.node_costs])
    return Solved(
        built=built,
        labels=np.asarray(candidate.solution.assignment % sizes, dtype=np.int64),
        mesh=candidate.mesh,
        prices=Prices(query.cluster, candidate.mesh),
        state_bytes=query.state_bytes,
        lifetimes=lifetimes,
        weights=weight_operators(query.program, lifetimes),
    )


def table_of(
    solved: Solved,
    ways: Mapping[str, SolvedWay],
    runs: Runs,
    cluster: Cluster,
    num_groups: int,
    query: Query,
    *,
    gather_once: bool = False,
) -> BlockTable:
    """The block table of a sub-mesh. cluster: the whole one; query: of the whole question, for its memory limit."""
    across = whole_mesh(num_groups, solved.mesh) if num_groups > 1 else Mesh((PIPELINE_AXIS,), (cluster.num_devices,))
    per_node = 1 if cluster.num_nodes == 1 else max(1, cluster.devices_per_node // solved.mesh.size)
    far, near = (between_groups(cluster, across.shape, ends) for ends in ((per_node - 1, per_node), (0, 1)))

    def send_seconds(nbytes: float) -> float:
        return float(collective_seconds("neighbours", nbytes, far, cluster))

    table = block_table(
        solved,
        ways,
        runs,
        query.budget_bytes,
        send_seconds,
        1 if query.micro is None else query.micro.count,
        gather_once=gather_once,
        copy_rates=_copy_rates(cluster),
        host_capacity_bytes=_host_capacity(cluster),
    )
    if near == far:
        return table
    seconds = collective_seconds("neighbours", table.send_bytes, near, cluster)
    return replace(table, near_seconds=seconds, groups_per_node=per_node)


def _copy_rates(cluster: Cluster) -> tuple[float, float]:
    """Bytes per second of a device to the host and from there, while all of a node copy."""
    if cluster.host is None:
        return math.inf, math.inf
    to_host, from_host = (copy_rate(cluster.host, way, cluster.devices_per_node) for way in WAYS)
    return to_host, from_host


def _host_capacity(cluster: Cluster) -> float:
    """What a device may fill of the memory that all of a node share."""
    if cluster.host is None:
        return math.inf
    return cluster.host.bytes_per_device(cluster.devices_per_node)


def asked_modes(query: Query) -> tuple[str, ...]:
    """The ways in which stages may keep what backward reads, by what was asked."""
    asked = query.recompute
    on_host = HOST_MODES if ACTIVATIONS in query.may_wait_on_host else ()
    return (
        *(MODES if asked is None else (asked,)),
        *(mode for mode in on_host if asked in (None, RECOMPUTE_OF[mode])),
    )


def tables_of(
    query: Query, part: Query, solved: Solved, runs: Runs, num_groups: int, modes: Sequence[str] = MODES
) -> list[BlockTable]:
    """The block tables of a sub-mesh: where parameters are gathered once per step, if any are, and for every part."""
    ways = ways_of(solved, modes)
    each, once = (
        table_of(solved, ways, runs, query.cluster, num_groups, part, gather_once=once) for once in (False, True)
    )
    return [each] if np.allclose(each.seconds, once.seconds) else [once, each]
