"""Rank groups: the devices of one stage, as a cluster of their own.

    "2x8 H100-SXM" in 4 groups      4 neighbouring devices of a node each
    "2x8 H100-SXM" in 2 groups      a node each

A group lies inside a node, side by side with others of its size, or fills nodes.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster


def cluster_of(cluster: Cluster, devices: int) -> Cluster:
    """The devices of one rank group, as a cluster. Raises ConfigurationError where they neither fill nodes nor lie
    inside one, side by side with others of their size."""
    per_node = cluster.devices_per_node
    one_node = cluster.num_nodes == 1
    if not 1 <= devices <= cluster.num_devices or (
        not one_node and (devices % per_node if devices > per_node else per_node % devices)
    ):
        raise ConfigurationError(
            f"a rank group of {devices} of {cluster.num_devices} devices in nodes of {per_node}: groups must fill "
            "nodes, or divide one"
        )
    nodes = max(1, devices // per_node)
    return replace(cluster, num_nodes=nodes, devices_per_node=devices // nodes)


def sub_cluster(cluster: Cluster, num_groups: int) -> Cluster:
    """The devices of one of `num_groups` equal runs of neighbouring devices. Raises ConfigurationError where they do
    not fill nodes or divide one."""
    devices, per_node = cluster.num_devices, cluster.devices_per_node
    fitting = [
        size for size in range(1, devices + 1) if devices % size == 0 and not (size % per_node and per_node % size)
    ]
    possible = [devices // size for size in reversed(fitting)]
    if num_groups not in possible:
        raise ConfigurationError(
            f"pp={num_groups} cuts {devices} devices in nodes of {per_node} into no equal groups that fill nodes or "
            f"divide one: write one of {', '.join(map(str, possible))}"
        )
    size = devices // num_groups
    nodes = max(1, size // per_node)
    return replace(cluster, num_nodes=nodes, devices_per_node=size // nodes)
