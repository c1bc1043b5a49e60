"""Seconds of a lowered program: what every kernel and every collective of one rank costs, from local shapes.

    mm#0        (4096, 2048) @ (2048, 3072)          compute     1.9e-4 s
    gelu#0      in mm's neighbour's kernel           compute     bytes of what the kernel reads and writes
    all_reduce  (4096, 2048) float16 over "tp"       tp          collective over the links that the axis crosses

The same operator and collective costs price the planner's strategies (`planner/prices.py`), so a plan and the
program made of it cannot disagree. Nodes that move nothing on a GPU (views, waits, padding that pads nothing) are left
out; which nodes share a kernel says `kernel_groups`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.cluster import Cluster, GroupTopology
from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.kernel_groups import Traffic, group_reads_writes, kernel_groups
from autopar.cost_models.operator_names import LOOKUPS, base_name, operator_kind
from autopar.cost_models.operators import operator_seconds
from autopar.layout import Mesh
from autopar.rules.engine import rule_for

COMPUTE = "compute"
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
_PARTS = ("region", "piece", "trimmed", "slice", "select")
"""Operators that read only as much as they return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAction:
    """One kernel or collective of a rank."""

    name: str
    """Operator (`module.path/op#k`) or parameter that it serves."""
    phase: str
    """ "forward" or "backward": the graph that it runs in; what is recomputed runs in backward."""
    stream: str
    """ "compute", or the axes of a collective ("tp", "dp_shard+tp")."""
    seconds: float
    kind: str
    """Bare operator name, or the kind of collective."""
    launches: int = 1
    """Kernels that the host launches for it; 0 for a later member of a kernel."""
    nbytes: float = 0.0
    """Of a collective: its full buffer."""
    dtype_bytes: int = 0
    """Of one element of that buffer."""
    moves_parameter: bool = False
    """Of a collective: it gathers a parameter or reduces a parameter's gradient."""
    weight_only: bool = False
    """Nothing but gradients of this segment's parameters depends on it: a split backward runs it in W."""


def program_actions(
    graph: fx.Graph,
    phase: str,
    *,
    cluster: Cluster,
    mesh: Mesh,
    backend: str,
    segment_of: Callable[[str], str],
    dtype: str | None = None,
    parameters: Collection[str] = (),
) -> list[ProgramAction]:
    """The actions of one lowered graph (of `split_forward_backward`) in program order.

    mesh: of the whole run, whose axes the graph's collectives name; backend: of `kernel_groups`; dtype: of matrix
    products, where it is not that of their operands (float8); parameters: names of the program's parameters.
    """
    describe_values(graph)
    groups = kernel_groups(graph, backend)
    traffic = group_reads_writes(graph, groups)
    weight_only = _weight_only(graph, segment_of) if phase == "backward" else frozenset()
    reduced = _reduced_gradients(graph) if phase == "backward" else frozenset()
    started: set[int] = set()
    actions = []
    for node in graph.nodes:
        collective = collective_of(node)
        if collective is not None:
            action = _collective(node, collective, phase, cluster, mesh)
            moves = action.name in parameters or node in reduced
            actions.append(replace(action, moves_parameter=moves, weight_only=node in weight_only))
        elif node in groups:
            leads = groups[node] not in started
            started.add(groups[node])
            seconds = _seconds(node, traffic[node], cluster, dtype, leads)
            actions.append(
                ProgramAction(
                    name=str(node.meta.get("operator", node.name)),
                    phase=phase,
                    stream=COMPUTE,
                    seconds=seconds,
                    kind=base_name(node.target),
                    launches=int(leads),
                    weight_only=node in weight_only,
                )
            )
    return actions


def describe_values(graph: fx.Graph) -> None:
    """Give every node of a lowered graph its `meta["val"]`: meta tensors of its local shapes."""
    for node in graph.nodes:
        shapes, dtypes = node.meta.get("local_shape"), node.meta.get("dtype")
        if "val" in node.meta or shapes is None or dtypes is None:
            continue
        if isinstance(dtypes, torch.dtype):
            node.meta["val"] = torch.empty(shapes, dtype=dtypes, device="meta")
        else:
            pairs = zip(shapes, dtypes, strict=True)
            node.meta["val"] = tuple(None if s is None else torch.empty(s, dtype=d, device="meta") for s, d in pairs)


def collective_of(node: fx.Node) -> str | None:
    """The kind of collective that a node starts ("all_gather"), None for any other node."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "_c10d_functional":
        return None
    return _COLLECTIVES.get(base_name(target))


def _collective(node: fx.Node, kind: str, phase: str, cluster: Cluster, mesh: Mesh) -> ProgramAction:
    names: tuple[str, ...] = node.meta["group_axes"]
    axes = tuple(mesh.axis_names.index(name) for name in names)
    topology = GroupTopology.of(cluster, mesh.shape, axes)
    element = node.meta["dtype"].itemsize
    nbytes = float(math.prod(node.meta["local_shape"]) * element)
    if kind == "reduce_scatter":
        nbytes *= topology.ranks
    seconds = float(collective_seconds(kind, nbytes, topology, cluster))  # type: ignore[arg-type]
    return ProgramAction(
        name=str(node.meta["operator"]), phase=phase, stream="+".join(names), seconds=seconds, kind=kind,
        nbytes=nbytes, dtype_bytes=element,
    )  # fmt: skip


def _seconds(node: fx.Node, traffic: Traffic, cluster: Cluster, dtype: str | None, leads: bool) -> float:
    kind = operator_kind(node.target)
    rule = rule_for(node) if kind != "memory" and isinstance(node.target, torch._ops.OpOverload) else None
    products = dtype if dtype is not None and kind == "matmul" else _dtype_name(node)
    return float(
        operator_seconds(
            cluster.device,
            flops=rule.flops if rule is not None else 0.0,
            bytes_moved=bytes_moved(node, traffic),
            dtype=products,
            kind=kind,
            kernels=int(leads),
        )
    )


def bytes_moved(node: fx.Node, traffic: Traffic) -> float:
    """Bytes that a node reads from and writes to memory, as a member of its kernel."""
    name = base_name(node.target)
    operands = node.all_input_nodes
    total = 0.0
    for read in traffic.reads:
        partly = name in _PARTS or (name in LOOKUPS and read is operands[0])
        total += _value_bytes(node, 0) if partly else _value_bytes(read)
    return total + sum(_value_bytes(node, output) for output in traffic.writes)


def _value_bytes(node: fx.Node, output: int | None = None) -> float:
    value = node.meta.get("val")
    if isinstance(value, tuple):
        chosen = value if output is None else value[output : output + 1]
        return float(sum(item.numel() * item.element_size() for item in chosen if item is not None))
    return float(value.numel() * value.element_size()) if isinstance(value, torch.Tensor) else 0.0


def _dtype_name(node: fx.Node) -> str:
    value = node.meta.get("val")
    first = next((v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, torch.Tensor)), None)
    return "float32" if first is None else str(first.dtype).removeprefix("torch.")


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
