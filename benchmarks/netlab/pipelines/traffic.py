"""Bytes that a plan is predicted to put on the links between nodes in a step: what each rank sends to other nodes.

Of a plan without stages: the collectives of its lowered program, small ones in their buckets, by what they send
(`cost_models.gloo.sent_bytes`).
Of a pipeline: every border's activation and its gradient, once per micro-batch, and the gradients of parameters that
several stages hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import fx

from autopar.cost_models.gloo import ALGORITHMS
from autopar.cost_models.gloo import sent_bytes as bytes_of
from autopar.cost_models.program_costs import collective_of
from autopar.errors import ConfigurationError
from autopar.graphs.expert_loads import EXCHANGED
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from autopar.layouts.placement import Mesh
from autopar.passes.lowering.chain import lowered_step
from autopar.passes.stages.cut_stages import StagePrograms, cut_stages
from autopar.plans.parallel_plan import Plan
from autopar.program import Program, in_one_part


def sent_bytes(program: Program, plan: Plan, cluster: Cluster) -> list[float]:
    """Bytes that every rank sends to other nodes in a step. program: of one micro-batch."""
    if plan.pipeline is None:
        return [
            sum(n * collective_bytes(graph, plan.mesh, cluster, rank) for graph, n in _runs(program, plan, rank))
            for rank in _ranks(plan)
        ]
    if plan.mesh.size != plan.mesh.shape[0]:
        raise ConfigurationError(f"mesh {plan.mesh.shape}: traffic inside of stages is not counted here")
    if cluster.devices_per_node > 1:
        raise ConfigurationError(f"{cluster.name}: traffic of stages that share nodes is not counted here")
    once = _shared_gradients(program, plan)
    return [plan.micro_batches * a + b for a, b in zip(_between_stages(program, plan), once, strict=True)]


def lowered_graphs(program: Program, plan: Plan, rank: int) -> list[fx.Graph]:
    """What a rank runs of a plan without stages, for one micro-batch."""
    return [part.graph for part in lowered_step(program, plan, rank).only.partition.graphs]


def _runs(program: Program, plan: Plan, rank: int) -> Iterator[tuple[fx.Graph, int]]:
    """What a rank runs of a plan without stages, and how often in a step."""
    micro = replace(in_one_part(program), count=plan.micro_batches)
    return ((module.graph, times) for _, module, times in lowered_step(micro, plan, rank).only.runs)


def _ranks(plan: Plan) -> range:
    return range(plan.mesh.size)


def link_bytes(program: Program, plan: Plan, cluster: Cluster) -> list[list[float]]:
    """Bytes [from][to] between nodes in a step of a plan without stages: what a rank sends in a collective goes in
    equal parts to the other nodes of its group, rows of experts to where their experts are. program: of one
    micro-batch."""
    nodes = range(cluster.num_nodes)
    found = [[0.0] * len(nodes) for _ in nodes]
    for rank in _ranks(plan):
        home = rank // cluster.devices_per_node
        for graph, times in _runs(program, plan, rank):
            for sent in _sent(graph, plan.mesh, cluster, rank):
                for other, nbytes in sent.items():
                    found[home][other] += times * nbytes
    return found


def collective_bytes(graph: fx.Graph, mesh: Mesh, cluster: Cluster, rank: int) -> float:
    """Bytes that a rank sends to other nodes in the collectives of its lowered graph."""
    return sum(sum(sent.values()) for sent in _sent(graph, mesh, cluster, rank))


def _sent(graph: fx.Graph, mesh: Mesh, cluster: Cluster, rank: int) -> Iterator[dict[int, float]]:
    """Per collective of a rank: other node -> bytes that it sends there."""
    home = rank // cluster.devices_per_node
    for node in graph.nodes:
        kind = collective_of(node)
        if kind is None:
            continue
        axes = [mesh.axis_names.index(name) for name in node.meta["group_axes"]]
        ranks, itemsize = _group(mesh, axes, rank), node.meta["dtype"].itemsize
        found = {peer // cluster.devices_per_node: 0.0 for peer in ranks if peer // cluster.devices_per_node != home}
        if EXCHANGED in node.meta:
            row_bytes = math.prod(node.meta["local_shape"][1:]) * itemsize
            for peer, rows in zip(ranks, node.meta[EXCHANGED].sent(ranks.index(rank)), strict=True):
                if peer // cluster.devices_per_node != home:
                    found[peer // cluster.devices_per_node] += rows * row_bytes
        else:
            group = GroupTopology.of(cluster, mesh.shape, axes)
            elements = max(math.prod(one.meta["local_shape"]) for one in (node, node.all_input_nodes[0]))
            _, across = bytes_of(kind, elements * itemsize, group.nodes, group.ranks_per_node)
            found = dict.fromkeys(found, across / max(len(found), 1))
        yield found


def _group(mesh: Mesh, axes: Sequence[int], rank: int) -> list[int]:
    """The ranks that differ from this one along the axes only."""
    mine, others = mesh.coordinate(rank), [axis for axis in range(len(mesh.shape)) if axis not in axes]
    return [peer for peer in range(mesh.size) if all(mesh.coordinate(peer)[axis] == mine[axis] for axis in others)]


def _between_stages(program: Program, plan: Plan) -> list[float]:
    """What each rank sends to other stages for one micro-batch."""
    pipeline = plan.pipeline
    assert pipeline is not None
    programs = _cut(program, plan)
    groups = [stage.rank_group for stage in pipeline.stages]
    sent = [0.0] * plan.mesh.size
    for stage, group in enumerate(groups):
        for backward in (False, True):
            for crossing in programs.crossings_from(stage, backward):
                if groups[crossing.target] != group:
                    sent[group] += _bytes(crossing.node)
    return sent


def _shared_gradients(program: Program, plan: Plan) -> list[float]:
    """What each rank sends, once per step, to add up gradients of parameters that several ranks hold."""
    assert plan.pipeline is not None
    groups = [stage.rank_group for stage in plan.pipeline.stages]
    holders = _cut(program, plan).holders
    sent = [0.0] * plan.mesh.size
    for node, value in zip(program.placeholders, program.inputs, strict=True):
        ranks = {groups[stage] for stage in holders.get(value.name, ())}
        if value.role == "parameter" and len(ranks) > 1:
            for rank in ranks:
                sent[rank] += ALGORITHMS["all_reduce"].wire(len(ranks)) * _bytes(node)
    return sent


def _cut(program: Program, plan: Plan) -> StagePrograms:
    assert plan.pipeline is not None
    return cut_stages(program, plan.pipeline.cuts)


def _bytes(node: fx.Node) -> float:
    return float(node.meta["val"].numel() * node.meta["val"].dtype.itemsize)
