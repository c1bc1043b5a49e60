"""Stage graphs: what the ranks of every stage of a pipeline run, as the runtime makes it (`runtime/emit_pipeline.py`).

    stages = stage_graphs(plan, program, cluster)
    stages.of[2].forward             the graph of every `2F..`; halves.whole of `2B..`, halves.inputs and .weights of
                                     `2I..` and `2W..`; prepared.prepare and late.reduce run once per step
    stages.of[2].cluster, .mesh      where it stands: its share of the cluster, and the axes that its graphs name

Equal rank groups are priced on the whole mesh, whose axes say which links they share. Unequal ones have each a mesh and
a share of the cluster of their own, of one part where devices are of several kinds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from autopar.cluster import Cluster, GroupTopology, MixedCluster, between_groups, refuse_mixed
from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.program_timeline import PassBytes
from autopar.graphs.forward_backward import Partition
from autopar.graphs.live_ranges import LiveRange, bytes_over_time, memory_events
from autopar.graphs.node_values import node_bytes
from autopar.layouts.placement import Layout, Mesh, local_shape
from autopar.parallel_plan import Plan
from autopar.passes.late_sums import CutGraph, cut_late_sums
from autopar.passes.lower import lower
from autopar.passes.once_per_step import Prepared, prepare_parameters
from autopar.passes.partition import split_forward_backward
from autopar.passes.stage_plans import stage_plan
from autopar.passes.stages import Crossing, StagePrograms, cut_stages
from autopar.passes.weight_gradients import BackwardGraphs, split_backward
from autopar.planner.stages.groups import cluster_of
from autopar.program import Program, returned_values
from autopar.schedules.actions import Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class StageGraphs:
    """One stage on one rank. plan: the layouts of its ranks; cluster, mesh: what its collectives cross; partition:
    forward and whole backward of one micro-batch, once-per-step work taken out; halves: the backward in one and in
    two pieces; sent: gradients that go to other stages; as_lowered: backward with all sums of gradients."""

    number: int
    plan: Plan
    cluster: Cluster
    mesh: Mesh
    lowered: Program
    partition: Partition
    prepared: Prepared | None
    halves: BackwardGraphs | None
    late: CutGraph | None
    sent: int
    as_lowered: fx.GraphModule | None

    @cached_property
    def live_ranges(self) -> list[LiveRange]:
        """Of one micro-batch; what a stage gathers once per step is not among them."""
        once = set[str]()
        if self.prepared is not None:
            graphs = [graph for graph in (self.prepared.forward, self.prepared.backward) if graph is not None]
            once = {n.name for graph in graphs for n in graph.graph.nodes if n.name.startswith("prepared_")}
        return [live for live in memory_events(self.partition) if live.name not in once]

    @cached_property
    def bytes_of_passes(self) -> tuple[PassBytes, PassBytes]:
        """(forward, backward) of one micro-batch; behind backward nothing is left, as gradients go into totals."""
        live = tuple(float(held) for held in bytes_over_time(self.live_ranges))
        live += (0.0,) * (1 + self.turn + self._backward_nodes - len(live))
        forward, backward = live[: self.turn], live[self.turn : self.turn + self._backward_nodes]
        saved = min(forward[-1:] + backward[:1], default=0.0)
        if self.partition.backward is None:
            return PassBytes(live=forward, before=0.0, after=forward[-1]), PassBytes(live=(), before=0.0, after=0.0)
        return PassBytes(live=forward, before=0.0, after=saved), PassBytes(live=backward, before=saved, after=0.0)

    @property
    def turn(self) -> int:
        """Nodes of forward: live ranges count those of backward from here on."""
        return sum(node.op != "output" for node in self.partition.forward.graph.nodes)

    @property
    def _backward_nodes(self) -> int:
        backward = self.partition.backward
        return 0 if backward is None else sum(node.op != "output" for node in backward.graph.nodes)

    @cached_property
    def kept_for_weights(self) -> tuple[fx.Node, ...]:
        """What the first half of backward hands to the second, but for parameters."""
        if self.halves is None:
            return ()
        kept = dict.fromkeys(returned_values(self.halves.inputs.graph)[self.sent :])
        return tuple(node for node in kept if node.name not in self.partition.parameters)

    @cached_property
    def kept_bytes(self) -> float:
        return float(sum(node_bytes(node) for node in self.kept_for_weights))

    @cached_property
    def gathered_bytes(self) -> Mapping[str, float]:
        """Operator or parameter -> bytes of what is gathered once per step and stays for it."""
        if self.prepared is None:
            return {}
        graph = self.prepared.prepare
        alone = Partition(forward=graph, backward=None, saved=(), parameters=frozenset(self.prepared.parameters))
        nodes = {node.name: node for node in graph.graph.nodes}
        end = len(nodes) - 1
        found: dict[str, float] = {}
        for live in memory_events(alone):  # views of what is gathered have no bytes of their own
            if live.last_index == end:
                name = str(nodes[live.name].meta.get("operator", live.name))
                found[name] = found.get(name, 0.0) + float(live.bytes)
        return found

    @cached_property
    def total_bytes(self) -> Mapping[str, float]:
        """Parameter -> bytes of the total of its gradient, whole where the stage reduces it once per step."""
        gradients = [output.name for output in self.lowered.outputs if output.role == "gradient"]
        if self.halves is None or self._unreduced is None:
            return {}
        values = returned_values(self._unreduced.graph)
        return {gradients[index]: float(node_bytes(values[index])) for index in self.halves.totals}

    @property
    def _unreduced(self) -> fx.GraphModule | None:
        """Backward before gradients are added to totals."""
        if self.late is not None:
            return self.late.unreduced
        return self.as_lowered


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineGraphs:
    """All stages of a plan, each on the first rank of its group, or at `place` there. cut: the whole program's."""

    plan: Plan
    cluster: Cluster
    schedule: Schedule
    cut: StagePrograms
    of: tuple[StageGraphs, ...]
    send_seconds: tuple[float, ...]
    """From every stage to the next: what crosses the border in forward, of one rank."""
    near: frozenset[int]
    """The borders, by number, that lie inside of a node."""

    def held_by(self, group: int) -> list[int]:
        """The stages of a rank group, in the order of the model."""
        return [stage for stage, holders in enumerate(self.schedule.holders) if group in holders]

    def shared_gradients(self, group: int) -> tuple[list[int], float]:
        """(the rank groups with which a group adds up gradients of parameters that they hold too, seconds of it on one
        rank)."""
        beside, seconds = set[int](), 0.0
        for stage in self.held_by(group):
            for entry in self.of[stage].lowered.inputs:
                holders = self.cut.holders.get(entry.name, frozenset()) if entry.role == "parameter" else frozenset()
                groups = {other for holder in holders for other in self.schedule.holders[holder]}
                if len(groups) > 1:
                    beside |= groups
                    nbytes = math.prod(entry.shape) * entry.dtype.itemsize
                    seconds += _border_seconds(self.plan, self.cluster, (min(holders), max(holders)), nbytes)
        return sorted(beside), seconds

    def message(self, crossing: Crossing) -> tuple[int, float]:
        """(bytes, seconds) of a value on its way from one rank of a stage to its peer of another."""
        nbytes = _local_bytes(crossing, self.of[crossing.source].plan)
        return nbytes, _border_seconds(self.plan, self.cluster, (crossing.source, crossing.target), nbytes)


def stage_graphs(plan: Plan, program: Program, cluster: Cluster, place: int = 0) -> PipelineGraphs:
    """The stages of a plan. program: of one micro-batch; place: the number of a rank inside its group.

    Raises PlanMismatchError where the program cannot be cut so.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    schedule = pipeline.built(plan.micro_batches)
    cut = cut_stages(program, [stage.last_operator for stage in pipeline.stages if stage.last_operator is not None])
    found = []
    for stage, holders in enumerate(schedule.holders):
        own = stage_plan(plan, cut, schedule, holders[0])
        on, mesh = _stands_on(plan, cluster, holders[0])
        found.append(_stage(stage, own, on, mesh, cut, pipeline.stages[stage].gather_once, place))
    return PipelineGraphs(
        plan=plan,
        cluster=cluster,
        schedule=schedule,
        cut=cut,
        of=tuple(found),
        send_seconds=tuple(_sends(plan, cut, found, cluster)),
        near=frozenset(e for e in range(len(found) - 1) if _between(plan, cluster, (e, e + 1))[0].nodes == 1),
    )


def _stage(
    number: int, own: Plan, cluster: Cluster, mesh: Mesh, cut: StagePrograms, once: bool, place: int
) -> StageGraphs:
    lowered = lower(cut.programs[number], own, rank=place % own.mesh.size)
    recomputed = [name for name, operator in own.operators.items() if operator.recompute]
    partition = split_forward_backward(lowered, recomputed)
    prepared = prepare_parameters(partition) if once else None
    if prepared is not None:
        partition = replace(partition, forward=prepared.forward, backward=prepared.backward)
    late, halves, sent = None, None, 0
    as_lowered = partition.backward
    if as_lowered is not None:
        sent = len([o for o in lowered.outputs if o.role == "gradient" and o.name not in cut.holders])
        late = cut_late_sums(as_lowered, sent, growing=once)
        halves = split_backward(as_lowered if late is None else late.unreduced, sent)
        partition = replace(partition, backward=halves.whole)
    return StageGraphs(
        number=number,
        plan=own,
        cluster=cluster,
        mesh=mesh,
        lowered=lowered,
        partition=partition,
        prepared=prepared,
        halves=halves,
        late=late,
        sent=sent,
        as_lowered=as_lowered,
    )


def _stands_on(plan: Plan, cluster: Cluster, group: int) -> tuple[Cluster, Mesh]:
    """The cluster and the mesh that price the collectives of a rank group."""
    assert plan.pipeline is not None
    if not plan.pipeline.groups:
        refuse_mixed(cluster, "a pipeline of equal rank groups")
        return cluster, plan.mesh
    own = plan.on_group(group).mesh
    return cluster_of(_part_of(plan, cluster, group), own.size), own


def _part_of(plan: Plan, cluster: Cluster, group: int) -> Cluster:
    """The part of a cluster of several kinds on which a rank group stands; else the cluster itself."""
    if not isinstance(cluster, MixedCluster):
        return cluster
    first = plan.rank_groups[group].first_rank
    return max(zip(cluster.first_ranks, cluster.parts, strict=True), key=lambda one: (one[0] <= first, one[0]))[1]


def _sends(plan: Plan, cut: StagePrograms, stages: list[StageGraphs], cluster: Cluster) -> list[float]:
    found = []
    for border in range(len(stages) - 1):
        crossing = [c for c in cut.crossings if not c.is_backward and c.source <= border < c.target]
        nbytes = sum(_local_bytes(c, stages[c.source].plan) for c in {c.name: c for c in crossing}.values())
        found.append(_border_seconds(plan, cluster, (border, border + 1), nbytes))
    return found


def _border_seconds(plan: Plan, cluster: Cluster, ends: tuple[int, int], nbytes: float) -> float:
    """Seconds from every device of one stage to its peer of the next, as the planner prices a border."""
    topology, part = _between(plan, cluster, ends)
    return float(collective_seconds("neighbours", nbytes, topology, part))


def _between(plan: Plan, cluster: Cluster, ends: tuple[int, int]) -> tuple[GroupTopology, Cluster]:
    """How the devices of two stages lie, and the cluster whose links they use."""
    assert plan.pipeline is not None
    groups = [plan.pipeline.stages[stage].rank_group for stage in ends]
    if not plan.pipeline.groups:
        return between_groups(cluster, plan.mesh.shape, (groups[0], groups[1])), cluster
    own = plan.on_group(groups[0]).mesh
    part, other = (_part_of(plan, cluster, group) for group in groups)
    if part is not other:
        side_by_side = min(own.size, part.devices_per_node)
        topology = GroupTopology(ranks=2, nodes=2, ranks_per_node=1, groups_per_node=side_by_side)
        part = replace(part, inter_link=cluster.inter_link)
    else:
        count = part.num_devices // own.size
        shape = (count, *own.shape) if count > 1 else (part.num_devices,)
        topology = GroupTopology.of(part, shape, (0,)).border
    return topology, part


def _local_bytes(crossing: Crossing, own: Plan) -> int:
    value: Any = crossing.node.meta["val"]
    layout: Layout = own.inputs[crossing.name]
    return math.prod(local_shape(value.shape, layout, own.mesh, own.mesh.coordinate(0))) * int(value.dtype.itemsize)
