"""Mesh links: which link of the cluster the collectives of every axis of a plan's mesh cross.

[str(axis) for axis in mesh_axes(plan)]
["dp_shard=32: groups over 32 nodes, 8 groups share a node's network, InfiniBand at 47 GB/s per device",
 "tp=8: inside a node of 8, NVSwitch4 at 360 GB/s per device"]
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import Link
from autopar.hardware.group_topology import GroupTopology
from autopar.plans.plan_value import PlanValue
from autopar.plans.planned_cluster import cluster_of


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of the mesh: where its groups lie. link: what its collectives cross; "" where that is not known."""

    name: str
    size: int
    link: str
    crosses_nodes: bool

    def __str__(self) -> str:
        return f"{self.name}={self.size}: {self.link}" if self.link else f"{self.name}={self.size}"


def mesh_axes(plan: PlanValue) -> list[Axis]:
    """Every axis with the link that its collectives cross."""
    cluster = cluster_of(plan)
    return [_axis(plan, cluster, index) for index in range(len(plan.mesh.shape))]


def _axis(plan: PlanValue, cluster: Cluster | None, index: int) -> Axis:
    name, size = plan.mesh.axis_names[index], plan.mesh.shape[index]
    if cluster is None or plan.staged.groups:
        return Axis(name, size, "", False)
    topology = GroupTopology.of(cluster, plan.mesh.shape, (index,))
    if topology.nodes > 1:
        sharing = f", {topology.groups_per_node} groups share a node's network" if topology.groups_per_node > 1 else ""
        is_pipeline = plan.in_stages and index == 0
        what = "messages between stages" if is_pipeline else f"groups over {topology.nodes} nodes"
        return Axis(name, size, f"{what}{sharing}, {_rate(cluster.inter_link)}", True)
    return Axis(name, size, f"inside a node of {cluster.devices_per_node}, {_rate(cluster.intra_link)}", False)


def _rate(link: Link) -> str:
    return f"{link.name} at {link.bytes_per_second / 1e9:.3g} GB/s per device"
