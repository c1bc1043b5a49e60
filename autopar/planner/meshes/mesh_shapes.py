"""Mesh shapes: which meshes a question leaves to try.

    resolve_meshes(cluster, (2, 4), None)         the given one
    resolve_meshes(cluster, None, {"tp": 4})      named axes inside, free ones in front of them
    resolve_meshes(cluster, None, {"cp": 8})      cp=8; cp=2 x cp_inner=4; cp=4 x cp_inner=2
    resolve_meshes(cluster, None, None)           every factorisation: (8,), (2, 4), (2, 2, 2) on one node of 8

A mesh lies row-major over the ranks, so its sizes say which links an axis uses: on "32x8 H100-SXM" the first axis of
(32, 8) crosses nodes and the second stays inside one, while the second of (16, 16) straddles. Two shapes that differ
only in the order of axes that see the same links are one shape; the one with the smaller outer axis stays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology, cut_at_nodes
from autopar.layouts.placement import Mesh
from autopar.request.mesh_axes import AXIS_NAMES, CONTEXT_AXES, FREE_AXIS_NAMES, MOST_AXES, pinned_axes, sized_mesh

Shape = tuple[int, ...]


def resolve_meshes(cluster: Cluster, mesh: Sequence[int] | None, dims: Mapping[str, int] | None) -> list[Mesh]:
    """The meshes to try, those of few axes first: the given one, or every one that has the pinned axes.

    Raises ConfigurationError for unknown axes and sizes that do not divide the devices.
    """
    if mesh is not None:
        return [sized_mesh(mesh, cluster.num_devices)]
    found = []
    for pinned in _with_inner_context(pinned_axes(dims or {}, cluster.num_devices)):
        sizes = tuple(pinned.values())
        rest = cluster.num_devices // math.prod(sizes)
        shapes = free_shapes(rest, sizes, cluster.devices_per_node)
        found += [Mesh((*free_names(len(shape), pinned), *pinned), (*shape, *sizes)) for shape in shapes]
    return found or [Mesh((next(iter(dims or {}), "inner"),), (1,))]


def _with_inner_context(pinned: dict[str, int]) -> Iterator[dict[str, int]]:
    """The named axes, and again with `cp` cut into an outer and an inner one."""
    yield pinned
    outer, inner = CONTEXT_AXES
    if outer in pinned and inner not in pinned and len(pinned) < MOST_AXES:
        for first in _divisors(pinned[outer]):
            both = {**pinned, outer: first, inner: pinned[outer] // first}
            yield {name: both[name] for name in AXIS_NAMES if name in both}


def free_shapes(num_devices: int, pinned: Shape, devices_per_node: int) -> list[Shape]:
    """Sizes of the free axes in front of `pinned` ones: every factorisation of `num_devices` once, few axes first.

    A list with () where pinned axes use all devices.
    """
    if num_devices == 1:
        return [()] if pinned else []
    found: dict[object, Shape] = {}
    for num_axes in range(1, MOST_AXES - len(pinned) + 1):
        for shape in _factorisations(num_devices, num_axes):
            found.setdefault(_links(shape, pinned, devices_per_node), shape)
    return list(found.values())


def free_names(num_axes: int, taken: Mapping[str, int]) -> tuple[str, ...]:
    """Names of the free axes beside named ones: a single one in front of others is "outer"."""
    if num_axes == 1 and taken:
        return ("outer",)
    return FREE_AXIS_NAMES[num_axes]


def coarser(mesh: Mesh, devices_per_node: int) -> frozenset[object]:
    """What `link_key` gives for the meshes of which this one is a refinement: neighbouring free axes joined to one.

    A plan on (ab, c) is one on (a, b, c), where a and b do together what ab did. Axes that see the same links may stand
    in any order, so all of these are joined.
    """
    free, pinned = _free_and_pinned(mesh)
    key = _links(free, pinned, devices_per_node)
    orders = {order for order in itertools.permutations(free) if _links(order, pinned, devices_per_node) == key}
    joined: set[Shape] = set()
    while orders:
        orders = {
            (*order[:axis], order[axis] * order[axis + 1], *order[axis + 2 :])
            for order in orders
            for axis in range(len(order) - 1)
        }
        joined |= orders
    return frozenset(_links(shape, pinned, devices_per_node) for shape in joined)


def parts_of(fine: Mesh, coarse: Mesh, devices_per_node: int) -> Shape | None:
    """Per axis of the fine mesh the axis of the coarse one of which it is a part; None where it refines another mesh.

    (2, 16, 8) of (32, 8) is (0, 0, 1). Where axes that see the same links stand in another order, (2, 8, 16) of
    (16, 16) on nodes of 8, each part goes to an axis with its links.
    """
    free, pinned = _free_and_pinned(fine)
    wanted, _ = _free_and_pinned(coarse)
    axes_of_links: dict[object, list[int]] = {}
    for axis, link in enumerate(_link_of_axes(wanted, pinned, devices_per_node)):
        axes_of_links.setdefault(link, []).append(axis)
    key = _links(free, pinned, devices_per_node)
    for order in itertools.permutations(range(len(free))):
        sizes = tuple(free[axis] for axis in order)
        if _links(sizes, pinned, devices_per_node) != key:
            continue
        for ends in itertools.combinations(range(1, len(free)), len(wanted) - 1):
            groups = [order[start:end] for start, end in itertools.pairwise((0, *ends, len(free)))]
            joined = tuple(math.prod(free[axis] for axis in group) for group in groups)
            if _links(joined, pinned, devices_per_node) != _links(wanted, pinned, devices_per_node):
                continue
            left = {link: list(axes) for link, axes in axes_of_links.items()}
            found = dict(enumerate(range(len(wanted), len(coarse.shape)), start=len(free)))
            for group, link in zip(groups, _link_of_axes(joined, pinned, devices_per_node), strict=True):
                found |= dict.fromkeys(group, left[link].pop(0))
            return tuple(found[axis] for axis in range(len(fine.shape)))
    return None


def _link_of_axes(free: Shape, pinned: Shape, devices_per_node: int) -> list[object]:
    """What `_links` compares of every free axis: its parts across and inside nodes, or its place."""
    parts = cut_at_nodes((*free, *pinned), devices_per_node)
    return list(range(len(free))) if parts is None else list(parts[: len(free)])


def link_key(mesh: Mesh, devices_per_node: int) -> object:
    """Equal for meshes that `resolve_meshes` takes as one."""
    return _links(*_free_and_pinned(mesh), devices_per_node)


def _free_and_pinned(mesh: Mesh) -> tuple[Shape, Shape]:
    """Sizes of the axes without and with a name of a preset; the free ones lie in front."""
    pinned = sum(name in AXIS_NAMES for name in mesh.axis_names)
    return mesh.shape[: len(mesh.shape) - pinned], mesh.shape[len(mesh.shape) - pinned :]


def _links(shape: Shape, pinned: Shape, devices_per_node: int) -> object:
    """Equal for shapes whose sets of axes all have the same `GroupTopology`: that of a set is determined by the parts
    of its axes across and inside nodes, in any order. A shape that does not line up with nodes equals only itself."""
    parts = cut_at_nodes((*shape, *pinned), devices_per_node)
    if parts is None:
        return shape
    return tuple(sorted(parts[: len(shape)])), parts[len(shape) :]


def _factorisations(number: int, num_factors: int) -> Iterator[Shape]:
    """Ordered factorisations into factors above one, ascending."""
    if num_factors == 1:
        yield (number,)
        return
    for first in _divisors(number):
        yield from ((first, *others) for others in _factorisations(number // first, num_factors - 1))


def _divisors(number: int) -> list[int]:
    """Divisors but one and itself, ascending."""
    small = [d for d in range(2, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def links_of_axes(cluster: Cluster, mesh: Mesh) -> dict[str, str]:
    """Axis name -> "inside a node", "across nodes" or "inside and across nodes"."""
    words = {}
    for axis, name in enumerate(mesh.axis_names):
        topology = GroupTopology.of(cluster, mesh.shape, (axis,))
        if topology.nodes == 1:
            words[name] = "inside a node"
        else:
            words[name] = "across nodes" if topology.ranks_per_node == 1 else "inside and across nodes"
    return words
