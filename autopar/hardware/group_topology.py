"""How the groups of mesh axes lie on the nodes of a cluster: who shares which link.

    GroupTopology.of(Cluster.parse("2x8 H100-SXM"), (2, 8), axes=[1])     8 ranks inside of one node
    GroupTopology.of(Cluster.parse("2x8 H100-SXM"), (2, 8), axes=[0])     2 ranks on two nodes, 8 groups side by side
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster, refuse_mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTopology:
    """How the groups of one set of mesh axes lie on the nodes (of unequal groups, the worst)."""

    ranks: int
    """Devices of one group."""
    nodes: int
    """Nodes that one group spans."""
    ranks_per_node: int
    """Most devices of one group in one node."""
    groups_per_node: int
    """Sibling groups that share a node's NICs; all siblings run their collective at the same time."""

    @classmethod
    def of(cls, cluster: Cluster, mesh_shape: Sequence[int], axes: Iterable[int]) -> GroupTopology:
        """Topology of the collective over `axes` (indices) of a mesh laid row-major over the ranks.

        The last axis is innermost: mesh (2, 8) on 2 nodes of 8 keeps axis 1 inside the nodes.
        Raises ConfigurationError where the mesh has more devices than the cluster or lacks an axis.
        """
        refuse_mixed(cluster, "a mesh")
        shape, chosen = tuple(mesh_shape), frozenset(axes)
        if math.prod(shape) > cluster.num_devices:
            raise ConfigurationError(
                f"mesh {shape} needs {math.prod(shape)} devices, cluster {cluster.name!r} has {cluster.num_devices}"
            )
        if not chosen <= set(range(len(shape))):
            raise ConfigurationError(f"mesh {shape} has no axes {sorted(chosen - set(range(len(shape))))}")
        return _group_topology(cluster.devices_per_node, shape, chosen)

    @property
    def border(self) -> GroupTopology:
        """Two neighbours of such a group, on two nodes where it spans several: the two ends of a pipeline's border."""
        ranks, nodes = min(self.ranks, 2), min(self.nodes, 2)
        return GroupTopology(
            ranks=ranks, nodes=nodes, ranks_per_node=ranks // nodes, groups_per_node=self.groups_per_node
        )


def between_groups(cluster: Cluster, mesh_shape: Sequence[int], groups: tuple[int, int]) -> GroupTopology:
    """Every device of one rank group, an index of a mesh's first axis, with its peer of another, all at once."""
    size = math.prod(mesh_shape[1:])
    nodes = {group * size // cluster.devices_per_node for group in groups}
    if cluster.num_nodes == 1 or size >= cluster.devices_per_node or len(nodes) > 1:
        return GroupTopology.of(cluster, mesh_shape, (0,)).border
    return GroupTopology(ranks=2, nodes=1, ranks_per_node=2, groups_per_node=cluster.devices_per_node // 2)


def cut_at_nodes(mesh_shape: Sequence[int], devices_per_node: int) -> tuple[tuple[int, int], ...] | None:
    """(part across nodes, part inside a node) of every axis of a mesh laid row-major over the ranks.

    cut_at_nodes((4, 16), 8) is ((4, 1), (2, 8)). None where the axes do not line up with the nodes, as (4, 3) on 8.
    """
    room, parts = devices_per_node, []
    for size in reversed(mesh_shape):
        if size % room and room % size:
            return None
        inside = min(size, room)
        room //= inside
        parts.append((size // inside, inside))
    return tuple(reversed(parts))


@functools.lru_cache(maxsize=4096)
def _group_topology(devices_per_node: int, mesh_shape: tuple[int, ...], axes: frozenset[int]) -> GroupTopology:
    parts = cut_at_nodes(mesh_shape, devices_per_node)
    if parts is None:
        return _counted_topology(devices_per_node, mesh_shape, axes)
    nodes = math.prod(across for axis, (across, _) in enumerate(parts) if axis in axes)
    ranks_per_node = math.prod(inside for axis, (_, inside) in enumerate(parts) if axis in axes)
    return GroupTopology(
        ranks=nodes * ranks_per_node,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        groups_per_node=math.prod(inside for axis, (_, inside) in enumerate(parts) if axis not in axes),
    )


def _counted_topology(devices_per_node: int, mesh_shape: tuple[int, ...], axes: frozenset[int]) -> GroupTopology:
    """The same for any mesh, by counting the members of every group on every node."""
    others = [axis for axis in range(len(mesh_shape)) if axis not in axes]
    ranks = math.prod(mesh_shape[axis] for axis in axes)
    node_of_rank = np.arange(math.prod(mesh_shape)).reshape(mesh_shape) // devices_per_node
    groups = node_of_rank.transpose([*others, *sorted(axes)]).reshape(-1, ranks)
    num_nodes = int(groups.max()) + 1
    members = np.bincount(
        (np.arange(len(groups))[:, None] * num_nodes + groups).ravel(), minlength=len(groups) * num_nodes
    ).reshape(len(groups), num_nodes)
    present = members > 0
    return GroupTopology(
        ranks=ranks,
        nodes=int(present.sum(axis=1).max()),
        ranks_per_node=int(members.max()),
        groups_per_node=int(present.sum(axis=0).max()),
    )
