"""The mesh of a report, drawn onto nodes and links: one picture per axis, with the group of rank 0 marked.

    tp=8      node 0 [0 1 2 3 / 4 5 6 7]  node 1 [. . . . / . . . .]     frame lit: the group talks inside a node
    dp=4      node 0 [0 . . . / . . . .]--node 1 [8 . . . / . . . .]--   line lit: it talks over the network

Nodes are small pictures beside each other, so that they wrap on a narrow screen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.hardware.cluster import Cluster
from autopar.plans.mesh_links import Axis, mesh_axes
from autopar.plans.parallel_plan import Plan
from autopar.plans.planned_cluster import cluster_of
from autopar.report.html.palette import PARTS

MOST_NODES = 8
"""Nodes that a picture shows."""
COLUMNS, CELL, MARGIN = 4, 26, 8
"""Devices beside each other in a node; pixels of one with its gap, and around them."""
LONGEST_LABEL = 3
"""Digits of a number that a device has room for."""
LISTED = 8
"""Ranks of a group that the text names."""


@dataclass(frozen=True, slots=True)
class DrawnDevice:
    """A device: where its square stands, the number in it and its class in the style sheet."""

    x: int
    y: int
    label: str
    style: str


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """A node: lit_frame where the group talks inside of it, lit_line where it leaves it over the network."""

    number: int
    devices: tuple[DrawnDevice, ...]
    width: int
    height: int
    lit_frame: bool
    lit_line: bool


@dataclass(frozen=True, slots=True)
class AxisPicture:
    """One axis on the nodes of the cluster. text: the same in words; more_nodes: those that are not drawn."""

    axis: Axis
    text: str
    nodes: tuple[DrawnNode, ...]
    more_nodes: int
    has_network: bool


def mesh_pictures(plan: Plan) -> list[AxisPicture]:
    """A picture of every axis of more than one device; none where the cluster's name does not describe it."""
    cluster = cluster_of(plan)
    if cluster is None or plan.staged.groups:
        return []
    return [_picture(plan, cluster, index, axis) for index, axis in enumerate(mesh_axes(plan)) if axis.size > 1]


def group_ranks(shape: tuple[int, ...], index: int) -> list[int]:
    """The ranks that differ from rank 0 along one axis only; ranks are row-major on the mesh."""
    stride = math.prod(shape[index + 1 :])
    return [place * stride for place in range(shape[index])]


def _picture(plan: Plan, cluster: Cluster, index: int, axis: Axis) -> AxisPicture:
    ranks, per_node = group_ranks(plan.mesh.shape, index), cluster.devices_per_node
    count = cluster.num_devices // per_node
    is_pipeline = plan.in_stages and index == 0
    group = frozenset(ranks)
    shown = _shown(count, sorted({rank // per_node for rank in ranks}))
    stride = math.prod(plan.mesh.shape[1:])
    nodes = []
    for number in shown:
        own = range(number * per_node, (number + 1) * per_node)
        members = [rank for rank in own if rank in group]
        styles = [f"part-{rank // stride % len(PARTS)}" if is_pipeline else _style(rank in group) for rank in own]
        labels = [str(rank // stride) if is_pipeline else str(rank) for rank in own]
        nodes.append(_node(number, labels, styles, len(members) > 1, axis.crosses_nodes and bool(members)))
    return AxisPicture(axis, _text(axis, ranks, is_pipeline), tuple(nodes), count - len(shown), count > 1)


def _style(is_member: bool) -> str:
    return "member" if is_member else "device"


def _shown(count: int, used: list[int]) -> list[int]:
    """The nodes to draw: all, or the first that the group uses, and the first of the others between them."""
    if count <= MOST_NODES:
        return list(range(count))
    first = used[: MOST_NODES // 2] if len(used) < count else list(range(MOST_NODES))
    others = [number for number in range(2 * MOST_NODES) if number < count and number not in first]
    return sorted([*first, *others[: MOST_NODES - len(first)]])


def _node(number: int, labels: list[str], styles: list[str], lit_frame: bool, lit_line: bool) -> DrawnNode:
    devices = tuple(
        DrawnDevice(
            MARGIN + CELL * (place % COLUMNS),
            MARGIN + CELL * (place // COLUMNS),
            label if len(label) <= LONGEST_LABEL else "",
            style,
        )
        for place, (label, style) in enumerate(zip(labels, styles, strict=True))
    )
    columns, rows = min(COLUMNS, len(labels)), math.ceil(len(labels) / COLUMNS)
    return DrawnNode(number, devices, 2 * MARGIN + CELL * columns, 2 * MARGIN + CELL * rows, lit_frame, lit_line)


def _text(axis: Axis, ranks: list[int], is_pipeline: bool) -> str:
    if is_pipeline:
        return f"rank groups 0 to {axis.size - 1}, each of {ranks[1]} ranks beside each other; numbers are rank groups"
    more = f", ... {ranks[-1]}" if len(ranks) > LISTED else ""
    return f"marked: the group of rank 0, ranks {', '.join(map(str, ranks[:LISTED]))}{more}"
