"""Estimates: which pipelines to look at first, from a closed formula before any sub-mesh is solved.

    405 B parameters on 2,048 nodes of 8    16 groups of (128, 8), 16 micro-batches: about 7 s
                                            8 groups of (256, 8), 16 micro-batches: 2 data ranks share a sample

A pipeline of p groups of d x t devices (data x tensor) and m micro-batches is estimated to take

    max((work + starts + tensor) (1 + (p - 1) / v m), c sends) + 2 (p - 1) / m sends + gradients

work: what a device computes without stages. starts: of every operator of a group, once more per further micro-batch,
where a device waits for each (CPUs). tensor: an all_reduce of every cut of the model over t in forward and in
backward, as in tensor parallelism. (p - 1) / v m: the bubble, v = 3 of ZB-H1 (c = 1) or as many stages as a rank
interleaves (c = v), whichever makes the step shorter. gradients: a gather of the parameters and the sum of their
gradients over d, once. sends: of m cuts over one border, which the last of them crosses behind p - 1 others, there and
back. Data ranks that share a sample cost `sharing_cost` more per halving. The estimate orders the search and says how
much of its time pipelines deserve; it is no bound and no price.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from autopar.cost_models.collective_costs import collective_seconds
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from autopar.hardware.rank_groups import cluster_of
from autopar.layouts.placement import Mesh
from autopar.planner.meshes.choose_mesh import perfect_seconds
from autopar.planner.meshes.mesh_shapes import resolve_meshes
from autopar.planner.one_mesh.query import Query
from autopar.planner.pipelines.repeated_blocks import blocks_of
from autopar.planner.problem.graph_operators import operators
from autopar.planner.problem.limits import LIMITS
from autopar.planner.problem.prices import tensor_bytes
from autopar.program import batch_size
from autopar.schedules.list_scheduler import FAMILIES

ENDS = 2
"""Pieces of a model beside its blocks: what lies in front of them and behind."""
ZB_H1 = (3, 1)
"""(by what its bubble is smaller than that of 1F1B, how often a micro-batch crosses a border each way)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEstimate:
    """A pipeline of equal groups. seconds: of a step, by the formula."""

    groups: int
    count: int
    mesh: Mesh
    seconds: float

    @property
    def name(self) -> str:
        """As notes name it: groups, mesh, micro-batches."""
        return f"pp={self.groups} x {'x'.join(map(str, self.mesh.shape))}, {self.count} micro-batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTraffic:
    """What the formula knows of a model. Bytes of the whole batch: of one cut, of parameters, of these with states."""

    samples: int
    work_seconds: float
    num_blocks: int
    num_cuts: int
    num_operators: int
    cut_bytes: float
    parameter_bytes: float
    state_bytes: float

    @staticmethod
    def of(query: Query, work_seconds: float | None = None) -> PipelineTraffic:
        """Of the whole batch on the whole cluster. work_seconds: what devices compute in a baseline; None: perfect
        work."""
        blocks = blocks_of(query.program, query.factorisation)
        cuts = set(blocks.cuts)
        steps = operators(query.program)
        sizes = [tensor_bytes(node) for node in steps if node.meta["operator"] in cuts]
        parameters = [
            (float(tensor_bytes(node)), math.prod(entry.shape) * query.state_bytes[entry.name].optimizer)
            for node, entry in zip(query.program.placeholders, query.program.inputs, strict=True)
            if entry.role == "parameter"
        ]
        return PipelineTraffic(
            samples=batch_size(query.program) or 1,
            work_seconds=perfect_seconds(query) if work_seconds is None else work_seconds,
            num_blocks=blocks.num_blocks,
            num_cuts=len(sizes),
            num_operators=len(steps),
            cut_bytes=float(median(sizes)) if sizes else 0.0,
            parameter_bytes=sum(held for held, _ in parameters),
            state_bytes=sum(held + states for held, states in parameters),
        )


def look_faster(
    query: Query, traffic: PipelineTraffic, found: Sequence[PipelineEstimate], plain_seconds: float
) -> bool:
    """Whether the first estimate is far below a step without stages. Where parameters and states fill more than a node,
    whether it is below: what then fits without stages is slow to find, and slower than without a memory limit."""
    node_bytes = query.cluster.devices_per_node * query.budget_bytes
    share = 1.0 if traffic.state_bytes > node_bytes else LIMITS.promising_share
    return bool(found) and found[0].seconds < share * plain_seconds


def estimates(query: Query, traffic: PipelineTraffic) -> list[PipelineEstimate]:
    """Every pipeline of equal groups that is looked at, by their estimates."""
    count = query.micro_batches
    found: dict[tuple[int, Mesh], PipelineEstimate] = {}
    divisors = [number for number in range(2, traffic.samples + 1) if traffic.samples % number == 0]
    for groups in _group_counts(query.cluster, traffic.num_blocks + ENDS):
        size = query.cluster.num_devices // groups
        for data, tensor in _splits(cluster_of(query.cluster, size)):
            counts = [count] if count is not None else _counts(divisors, traffic.samples, groups, data)
            for number in counts:
                seconds = formula_seconds(traffic, query.cluster, groups, data, tensor, number)
                for shape, more in _shapes(query, traffic, groups, data, tensor):
                    mesh = resolve_meshes(cluster_of(query.cluster, size), shape, None)[0]
                    more += LIMITS.alone_cost if number == traffic.samples else 0.0
                    estimate = PipelineEstimate(groups=groups, count=number, mesh=mesh, seconds=seconds * (1.0 + more))
                    if estimate.seconds < found.get((number, mesh), estimate).seconds or (number, mesh) not in found:
                        found[number, mesh] = estimate
    return sorted(
        found.values(), key=lambda estimate: (estimate.seconds, estimate.groups, estimate.count, estimate.mesh.shape)
    )


def formula_seconds(
    traffic: PipelineTraffic, cluster: Cluster, groups: int, data: int, tensor: int, count: int
) -> float:
    """The formula of the module."""
    shape = (groups, data, tensor)
    summed = collective_seconds(
        "all_reduce", traffic.cut_bytes / (count * data), GroupTopology.of(cluster, shape, (2,)), cluster
    )
    tensor_seconds = 2.0 * traffic.num_cuts / groups * count * float(summed)
    across = GroupTopology.of(cluster, shape, (1,))
    share = traffic.parameter_bytes / (groups * tensor)
    gradients = sum(float(collective_seconds(kind, share, across, cluster)) for kind in ("all_gather", "all_reduce"))
    sharing = max(0.0, math.log2(data * count / traffic.samples))
    start_seconds = cluster.device.launch_seconds if cluster.device.kind == "cpu" else 0.0
    starts_seconds = (count - 1) * traffic.num_operators / groups * start_seconds
    busy = (traffic.work_seconds + starts_seconds + tensor_seconds) * (1.0 + LIMITS.sharing_cost * sharing)
    border = GroupTopology.of(cluster, shape, (0,)).border
    send = float(collective_seconds("neighbours", traffic.cut_bytes / (count * data * tensor), border, cluster))
    pieces = traffic.num_blocks + ENDS
    orders = [ZB_H1, *((v, v) for v in FAMILIES["interleaved"].chunks if v > ZB_H1[0] and v * groups <= pieces)]
    body = min(max(busy * (1.0 + (groups - 1) / (v * count)), c * count * send) for v, c in orders)
    return body + 2.0 * (groups - 1) * send + gradients


def _group_counts(cluster: Cluster, pieces: int) -> Iterator[int]:
    """Numbers of groups, up to the pieces of the model, that cut the cluster evenly, at nodes or inside them."""
    for groups in range(2, min(cluster.num_devices, LIMITS.estimated_groups, pieces) + 1):
        if cluster.num_devices % groups:
            continue
        try:
            cluster_of(cluster, cluster.num_devices // groups)
        except ConfigurationError:
            continue
        yield groups


def _splits(group: Cluster) -> Iterator[tuple[int, int]]:
    """(data, tensor) sizes of a rank group, the tensor axis inside a node."""
    for tensor in range(1, min(LIMITS.estimated_tensor, group.devices_per_node) + 1):
        if group.devices_per_node % tensor == 0:
            yield group.num_devices // tensor, tensor


def _counts(divisors: Sequence[int], samples: int, groups: int, data: int) -> list[int]:
    """The divisors of the batch nearest to some micro-batches per group, and to one sample per data rank."""
    wanted = [factor * groups for factor in LIMITS.estimated_parts] if divisors else []
    wanted += [samples // data] if divisors and samples // data >= 2 else []
    return list(dict.fromkeys(min(divisors, key=lambda number: abs(math.log(number / want))) for want in wanted))


def _shapes(
    query: Query, traffic: PipelineTraffic, groups: int, data: int, tensor: int
) -> Iterator[tuple[tuple[int, ...], float]]:
    """(sizes of the axes, what is added to the estimate): one or two axes, and copies of groups that share the states
    where a device does not hold them whole but needs only some others."""
    yield (data, tensor) if 1 not in (data, tensor) else (data * tensor,), 0.0
    whole = traffic.state_bytes / (groups * tensor)
    shared = next((n for n in range(2, data) if data % n == 0 and 2.0 * whole / n <= query.budget_bytes), None)
    if tensor > 1 and 2.0 * whole > query.budget_bytes and shared is not None:
        yield (data // shared, shared, tensor), LIMITS.finer_cost
