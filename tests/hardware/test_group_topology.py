"""Groups of mesh axes on the nodes of a cluster, against a count over all ranks."""

import dataclasses
import itertools
import math
from collections import Counter, defaultdict

import pytest

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology, between_groups


@pytest.mark.parametrize(
    ("mesh", "axes", "expected"),
    [
        ((2, 8), (1,), (8, 1, 8, 1)),  # inside the nodes
        ((2, 8), (0,), (2, 2, 1, 8)),  # across the nodes: 8 siblings share the NICs
        ((2, 8), (0, 1), (16, 2, 8, 1)),
        ((16,), (0,), (16, 2, 8, 1)),
        ((8, 2), (0,), (8, 2, 4, 2)),
        ((4, 2, 2), (0, 2), (8, 2, 4, 2)),
        ((2, 8), (), (1, 1, 1, 8)),
        ((4, 3), (1,), (3, 2, 3, 3)),  # 3 does not divide 8: the worst group spans two nodes
    ],
)
def test_topology_of_mesh_axes_on_two_nodes_of_eight(mesh, axes, expected) -> None:
    topology = GroupTopology.of(Cluster.parse("2x8 H100"), mesh, axes)
    assert (topology.ranks, topology.nodes, topology.ranks_per_node, topology.groups_per_node) == expected


@pytest.mark.parametrize("per_node", [1, 2, 4, 6, 8, 16])
@pytest.mark.parametrize("mesh", [(24,), (2, 12), (12, 2), (4, 6), (3, 8), (2, 3, 4), (4, 3, 2), (2, 2, 3, 2)])
def test_topology_equals_the_count_over_all_ranks(mesh: tuple[int, ...], per_node: int) -> None:
    cluster = dataclasses.replace(Cluster.parse("24x1 H100"), num_nodes=24, devices_per_node=per_node)
    for size in range(len(mesh) + 1):
        for axes in itertools.combinations(range(len(mesh)), size):
            nodes_of_groups: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
            for rank, coordinates in enumerate(itertools.product(*map(range, mesh))):
                group = tuple(c for axis, c in enumerate(coordinates) if axis not in axes)
                nodes_of_groups[group][rank // per_node] += 1
            found = GroupTopology.of(cluster, mesh, axes)
            assert found.ranks == math.prod(mesh[axis] for axis in axes)
            assert found.nodes == max(map(len, nodes_of_groups.values()))
            assert found.ranks_per_node == max(max(counts.values()) for counts in nodes_of_groups.values())
            siblings = Counter(node for counts in nodes_of_groups.values() for node in counts)
            assert found.groups_per_node == max(siblings.values())


def test_a_mesh_larger_than_the_cluster_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="needs 32 devices"):
        GroupTopology.of(Cluster.parse("2x8 H100"), (4, 8), (0,))
    with pytest.raises(ConfigurationError, match=r"no axes \[2\]"):
        GroupTopology.of(Cluster.parse("2x8 H100"), (2, 8), (2,))


def test_rank_groups_of_one_node_send_over_its_inside() -> None:
    cluster = Cluster.parse("2x8 A100-80")
    inside, across = (between_groups(cluster, (4, 4), ends) for ends in ((0, 1), (1, 2)))
    assert (inside.nodes, inside.ranks, inside.groups_per_node) == (1, 2, 4)
    assert across == GroupTopology.of(cluster, (4, 4), (0,)).border
    assert across.nodes == 2


@pytest.mark.parametrize("shape", [(2, 8), (1, 16)])
def test_rank_groups_that_fill_a_node_send_across(shape: tuple[int, int]) -> None:
    cluster = Cluster.parse("2x8 A100-80")
    assert between_groups(cluster, shape, (0, 1)) == GroupTopology.of(cluster, shape, (0,)).border
