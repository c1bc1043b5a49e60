"""Which meshes are tried: every factorisation once, named axes inside."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from autopar.layouts.placement import Mesh
from autopar.planner.meshes.mesh_shapes import (
    coarser,
    free_shapes,
    link_key,
    links_of_axes,
    parts_of,
    resolve_meshes,
)


def free(*shape: int) -> Mesh:
    return Mesh(tuple("abcd"[: len(shape)]), shape)


def key(*shape: int) -> object:
    return link_key(free(*shape), 8)


def shapes(cluster: str) -> list[tuple[int, ...]]:
    return [mesh.shape for mesh in resolve_meshes(Cluster.parse(cluster), None, None)]


def test_all_factorisations_of_one_node_are_tried_once() -> None:
    assert shapes("8 H100-SXM") == [(8,), (2, 4), (2, 2, 2)]
    assert shapes("1x16 H100-SXM") == [(16,), (2, 8), (4, 4), (2, 2, 4), (2, 2, 2, 2)]


def test_a_prime_number_of_devices_has_one_mesh() -> None:
    assert shapes("7 cpu") == [(7,)]


def test_one_device_is_one_mesh() -> None:
    assert resolve_meshes(Cluster.parse("1 cpu"), None, None) == [Mesh(("inner",), (1,))]
    assert resolve_meshes(Cluster.parse("1 cpu"), None, {"tp": 1}) == [Mesh(("tp",), (1,))]


def test_orders_of_axes_that_see_other_links_are_other_shapes() -> None:
    found = shapes("2x8 H100-SXM")
    assert {(2, 8), (8, 2), (4, 4)} <= set(found)
    assert {(2, 2, 4), (4, 2, 2)} & set(found)
    assert key(2, 8) != key(8, 2)
    assert key(2, 2, 4) == key(2, 4, 2)


@pytest.mark.parametrize("cluster", ["2x8 H100-SXM", "3x4 A10G", "2x6 A10G"])
def test_every_factorisation_has_exactly_one_representative_with_the_same_links(cluster: str) -> None:
    parsed = Cluster.parse(cluster)
    factorisations = [
        sizes
        for length in range(1, 5)
        for sizes in itertools.product(range(2, parsed.num_devices + 1), repeat=length)
        if math.prod(sizes) == parsed.num_devices
    ]
    found = shapes(cluster)
    for shape in factorisations:
        assert sum(_same_topologies(parsed, shape, other) for other in found) == 1, shape


def _same_topologies(cluster: Cluster, first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """By definition: some order of the axes of one has, for every set of axes, the topology of the other."""
    if sorted(first) != sorted(second):
        return False
    sets = [axes for size in range(len(first) + 1) for axes in itertools.combinations(range(len(first)), size)]
    return any(
        all(
            GroupTopology.of(cluster, first, axes) == GroupTopology.of(cluster, second, [order[a] for a in axes])
            for axes in sets
        )
        for order in itertools.permutations(range(len(first)))
    )


def test_sixteen_thousand_devices_have_few_shapes() -> None:
    found = shapes("2048x8 H100-SXM")
    assert len(found) == len(set(found))
    assert Counter(map(len, found)) == {1: 1, 2: 13, 3: 52, 4: 107}
    assert {(2048, 8), (16, 128, 8), (64, 32, 2, 4)} & set(found)


def test_named_axes_lie_inside_and_the_rest_is_free() -> None:
    eight = Cluster.parse("8 cpu")
    assert resolve_meshes(eight, None, {"dp_shard": -1, "tp": 2}) == [Mesh(("dp_shard", "tp"), (4, 2))]
    assert resolve_meshes(eight, None, {"tp": 4}) == [Mesh(("outer", "tp"), (2, 4))]
    assert resolve_meshes(eight, None, {"tp": 2}) == [
        Mesh(("outer", "tp"), (4, 2)),
        Mesh(("outer", "inner", "tp"), (2, 2, 2)),
    ]
    three = {"tp": 2, "dp_shard": 2, "dp_replicate": 2}
    assert resolve_meshes(eight, None, three) == [Mesh(("dp_replicate", "dp_shard", "tp"), (2, 2, 2))]


def test_pinned_axes_leave_room_for_four_in_all() -> None:
    assert {len(shape) for shape in free_shapes(16, (2, 2), 8)} == {1, 2}


def test_a_given_mesh_is_the_only_one() -> None:
    assert resolve_meshes(Cluster.parse("8 cpu"), (2, 2, 2), None) == [Mesh(("outer", "middle", "inner"), (2, 2, 2))]


def test_every_axis_says_which_link_it_uses() -> None:
    cluster = Cluster.parse("32x8 H100-SXM")
    words = links_of_axes(cluster, Mesh(("outer", "middle", "inner"), (8, 8, 4)))
    assert words == {"outer": "across nodes", "middle": "inside and across nodes", "inner": "inside a node"}


def test_a_finer_mesh_knows_the_coarser_ones() -> None:
    assert coarser(free(32, 8), 8) == {key(256)}
    assert coarser(free(16, 2, 8), 8) == {key(32, 8), key(16, 16), key(2, 128), key(256)}
    assert key(4, 64) not in coarser(free(16, 2, 8), 8)
    assert coarser(Mesh(("outer", "inner", "tp"), (2, 2, 2)), 8) == {link_key(Mesh(("outer", "tp"), (4, 2)), 8)}


def test_every_axis_of_a_finer_mesh_is_a_part_of_one_of_the_coarser() -> None:
    def free(*shape: int) -> Mesh:
        return Mesh(tuple("abcd"[: len(shape)]), shape)

    assert parts_of(free(2, 16, 8), free(32, 8), 8) == (0, 0, 1)
    assert parts_of(free(2, 16, 8), free(16, 16), 8) == (1, 0, 1)  # 2 and 8 stand together in another order
    assert parts_of(free(2, 16, 8), free(4, 64), 8) is None
    assert parts_of(Mesh(("outer", "inner", "tp"), (2, 2, 2)), Mesh(("outer", "tp"), (4, 2)), 8) == (0, 0, 1)


@pytest.mark.parametrize("cluster", ["8x8 H100-SXM", "3x4 A10G"])
def test_a_mesh_has_parts_of_exactly_its_coarser_ones(cluster: str) -> None:
    parsed = Cluster.parse(cluster)
    per_node = parsed.devices_per_node
    for fine, coarse in itertools.permutations(resolve_meshes(parsed, None, None), 2):
        parts = parts_of(fine, coarse, per_node)
        assert (parts is not None) == (link_key(coarse, per_node) in coarser(fine, per_node)), (fine, coarse)
        if parts is not None:
            sizes = [math.prod(s for s, p in zip(fine.shape, parts, strict=True) if p == a) for a in set(parts)]
            assert tuple(sizes) == coarse.shape
