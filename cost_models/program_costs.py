"""Seconds of a lowered program: what every kernel and every collective of one rank costs, from local shapes.

    mm#0        (4096, 2048) @ (2048, 3072)          compute     1.9e-4 s
    gelu#0      in mm's neighbour's kernel           compute     bytes of what the kernel reads and writes
    all_reduce  (4096, 2048) float16 over "tp"       tp          collective over the links that the axis crosses
    copy_to_host  (4096, 2048) float16               to host     all devices of the node copy at once

`operator_seconds` and `collective_seconds` price the planner's strategies too (`planner/problem/prices.py`), from the
same sizes and the same count of bytes, so a plan and the program made of it agree; `tests/planner/test_one_price.py`
says where they differ and why. Nodes that move nothing on a GPU (views, waits, padding that pads nothing) are left out;
which nodes share a kernel says `kernel_groups`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.cost_models.collective_costs import CollectiveKind, collective_seconds
from autopar.cost_models.copy_costs import STREAM_OF, copy_seconds
from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.cost_models.operator_sizes import EXPERT_LINEAR
from autopar.cost_models.symmetric_seconds import symmetric_seconds
from autopar.errors import ConfigurationError
from autopar.graphs.copy_nodes import Direction, copy_direction
from autopar.graphs.expert_loads import EXCHANGED
from autopar.graphs.kernel_groups import Traffic, group_reads_writes, kernel_groups
from autopar.graphs.node_values import describe_values, node_bytes
from autopar.graphs.operator_names import base_name, operator_kind
from autopar.graphs.symmetric_sizes import symmetric_sizes
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from autopar.layouts.placement import Mesh
from autopar.ops.symmetric_products import SYMMETRIC

COMPUTE = "compute"
_COLLECTIVES: Mapping[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAction:
    """One kernel or collective of a rank."""

    name: str
    """Operator (`module.path/op#k`) or parameter that it serves."""
    phase: str
    """ "forward" or "backward": the graph that it runs in; what is recomputed runs in backward."""
    stream: str
    """ "compute", the axes of a collective ("tp", "dp_shard+tp"), or the way of a copy ("to host", "from host")."""
    seconds: float
    kind: str
    """Bare operator name, or the kind of collective."""
    nbytes: float = 0.0
    """Of a collective: its full buffer. Of a copy to the host or back: what is copied."""
    dtype_bytes: int = 0
    """Of one element of that buffer."""
    host_seconds: float = 0.0
    """Of a collective: the part of its seconds in which the processor that computes works for it."""
    moves_parameter: bool = False
    """Of a collective: it gathers a parameter or reduces a parameter's gradient."""
    operand_elements: float = 0.0
    """Of a product of an activation or of its gradient with a weight: elements of its left operand."""
    position: int = 0
    """Of the node in its graph: kernels stand at their first node."""
    weight_only: bool = False
    """Nothing but gradients of this segment's parameters depends on it: a split backward runs it in W."""


def program_actions(
    graph: fx.Graph,
    phase: str,
    *,
    cluster: Cluster,
    mesh: Mesh,
    backend: str,
    prices: KernelPrices,
    segment_of: Callable[[str], str],
    parameters: Collection[str] = (),
) -> list[ProgramAction]:
    """The actions of one lowered graph (of `split_forward_backward`) in program order.

    mesh: of the whole run, whose axes the graph's collectives name; backend: of `kernel_groups`; prices: of
    kernels; parameters: names of the program's parameters.
    """
    describe_values(graph.nodes)
    groups = kernel_groups(graph, backend)
    traffic = group_reads_writes(graph, groups)
    members: dict[int, list[tuple[fx.Node, Traffic]]] = {}
    for node in traffic:
        members.setdefault(groups[node], []).append((node, traffic[node]))
    weight_only = _weight_only(graph, segment_of) if phase == "backward" else frozenset()
    reduced = _reduced_gradients(graph) if phase == "backward" else frozenset()
    gradients = _gradients(graph) if phase == "backward" else frozenset()
    actions = []
    for position, node in enumerate(graph.nodes):
        collective, direction = collective_of(node), copy_direction(node)
        if direction is not None:
            actions.append(replace(host_copy_action(node, direction, phase, cluster), position=position))
        elif node.target in SYMMETRIC:
            found = symmetric_actions(node, phase, cluster, mesh, prices)
            actions += [replace(action, position=position) for action in found]
        elif collective is not None:
            action = collective_action(node, collective, phase, cluster, mesh)
            moves = action.name in parameters or node in reduced
            actions.append(replace(action, moves_parameter=moves, weight_only=node in weight_only, position=position))
        elif node in groups and groups[node] in members:
            kernel = members.pop(groups[node])
            heavy = next((one for one, _ in kernel if operator_kind(one.target) != "memory"), kernel[0][0])
            actions.append(
                ProgramAction(
                    name=str(heavy.meta.get("operator", heavy.name)),
                    phase=phase,
                    stream=COMPUTE,
                    seconds=prices.seconds(kernel, adds_gradient=heavy in gradients),
                    kind=base_name(heavy.target),
                    operand_elements=_operand_elements(heavy),
                    position=position,
                    weight_only=all(one in weight_only for one, _ in kernel),
                )
            )
    return actions


def _operand_elements(node: fx.Node) -> float:
    if base_name(node.target) not in ("mm", *EXPERT_LINEAR):
        return 0.0
    return float(_first_operand(node).numel())


def _first_operand(node: fx.Node) -> torch.Tensor:
    value = node.all_input_nodes[0].meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def collective_of(node: fx.Node) -> CollectiveKind | None:
    """The kind of collective that a node starts ("all_gather"), None for any other node."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "_c10d_functional":
        return None
    kind = _COLLECTIVES.get(base_name(target))
    return "neighbours" if kind == "all_to_all" and _goes_to_one(node) else kind


def _goes_to_one(node: fx.Node) -> bool:
    """Whether a rank sends to one other rank and receives from one, as in a ring."""
    received, sent = node.args[1:3]
    return all(isinstance(sizes, list) and sum(map(bool, sizes)) == 1 for sizes in (received, sent))


def collective_action(node: fx.Node, kind: CollectiveKind, phase: str, cluster: Cluster, mesh: Mesh) -> ProgramAction:
    """A collective by the node that starts it, at position 0."""
    names: tuple[str, ...] = node.meta["group_axes"]
    axes = tuple(mesh.axis_names.index(name) for name in names)
    topology = GroupTopology.of(cluster, mesh.shape, axes)
    element = node.meta["dtype"].itemsize
    largest = max(_elements(node), _elements(node.all_input_nodes[0]))  # the whole buffer of a gather or a scatter
    nbytes = float(largest * element) * (node.meta[EXCHANGED].travels if EXCHANGED in node.meta else 1.0)
    seconds = float(collective_seconds(kind, nbytes, topology, cluster))
    return ProgramAction(
        name=str(node.meta["operator"]), phase=phase, stream="+".join(names), seconds=seconds, kind=kind,
        nbytes=nbytes, dtype_bytes=element, host_seconds=min(seconds, cluster.collective_host_seconds),
    )  # fmt: skip


def host_copy_action(node: fx.Node, direction: Direction, phase: str, cluster: Cluster) -> ProgramAction:
    """A copy to the host or back by the node that starts it, at position 0. Raises ConfigurationError for a cluster
    whose host nobody described."""
    if cluster.host is None:
        raise ConfigurationError(
            f"{node.meta.get('operator', node.name)} is copied to the host, and the cluster {cluster.name!r} says "
            "nothing of its host: give it one (docs/adding-hardware.md)"
        )
    nbytes = float(node_bytes(node))
    return ProgramAction(
        name=str(node.meta.get("operator", node.name)), phase=phase, stream=STREAM_OF[direction],
        seconds=float(copy_seconds(nbytes, cluster.host, direction, cluster.devices_per_node)),
        kind=base_name(node.target), nbytes=nbytes,
    )  # fmt: skip


def symmetric_actions(
    node: fx.Node, phase: str, cluster: Cluster, mesh: Mesh, prices: KernelPrices
) -> tuple[ProgramAction, ProgramAction]:
    """A product with its collective in symmetric memory, at position 0: what computes, and what it then waits for."""
    computed, waited = symmetric_seconds(node, cluster, mesh, prices)
    sizes, name = symmetric_sizes(node), str(node.meta["operator"])
    kind = "all_gather" if sizes.gathers else "reduce_scatter"
    return (
        ProgramAction(name=name, phase=phase, stream=COMPUTE, seconds=computed, kind="mm"),
        ProgramAction(
            name=name, phase=phase, stream="+".join(node.meta["group_axes"]), seconds=waited, kind=kind,
            nbytes=float(sizes.whole_bytes), dtype_bytes=sizes.itemsize,
        ),
    )  # fmt: skip


def _elements(node: fx.Node) -> int:
    return math.prod(node.meta["local_shape"])


def _gradients(graph: fx.Graph) -> frozenset[fx.Node]:
    """Products that are returned, or reduced and then returned: gradients of weights."""
    found = set()
    for node in graph.output_node().all_input_nodes:
        current = node
        while current.op == "call_function" and operator_kind(current.target) == "memory" and current.all_input_nodes:
            current = current.all_input_nodes[0]
        found.add(current)
    return frozenset(found)


def _weight_only(graph: fx.Graph, segment_of: Callable[[str], str]) -> frozenset[fx.Node]:
    """Nodes of a backward graph on which no other segment's nodes depend."""
    needed_elsewhere: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output":
            continue
        home = _segment(node, segment_of)
        for user in node.users:
            if user.op != "output" and (user in needed_elsewhere or _segment(user, segment_of) != home):
                needed_elsewhere.add(node)
                break
    return frozenset(node for node in graph.nodes if node.op == "call_function" and node not in needed_elsewhere)


def _segment(node: fx.Node, segment_of: Callable[[str], str]) -> str:
    return segment_of(str(node.meta.get("operator", node.name)))


def _reduced_gradients(graph: fx.Graph) -> frozenset[fx.Node]:
    """Collectives whose result is returned, with nothing but layout behind them: reductions of gradients."""
    returned = set(graph.output_node().all_input_nodes)
    found = set()
    for node in returned:
        current: Any = node
        while isinstance(current, fx.Node) and current.op == "call_function" and collective_of(current) is None:
            if len(current.all_input_nodes) != 1 or operator_kind(current.target) != "memory":
                break
            current = current.all_input_nodes[0]
        if isinstance(current, fx.Node) and collective_of(current) is not None:
            found.add(current)
    return frozenset(found)
