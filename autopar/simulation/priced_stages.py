"""Priced stages: what the ranks of every stage of a plan run, lowered as for the runtime, with what prices it.

    graphs = step_graphs(plan, program, cluster)
    graphs.of[2].lowered             the graphs of every `2F..`, `2B..`, `2I..` and `2W..`, and what runs once per step
    graphs.of[2].cluster, .mesh      where it stands: its share of the cluster, and the axes that its graphs name

Equal rank groups are priced on the whole mesh, whose axes say which links they share. Unequal ones have each a mesh and
a share of the cluster of their own, of one part where devices are of several kinds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from autopar.cost_models.collective_costs import collective_seconds
from autopar.cost_models.program_timeline import PassBytes
from autopar.graphs.live_ranges import LiveRange, bytes_over_time, memory_events, stage_memory_events
from autopar.graphs.node_values import node_bytes
from autopar.hardware.cluster import Cluster, MixedCluster, refuse_mixed
from autopar.hardware.group_topology import GroupTopology, between_groups
from autopar.hardware.rank_groups import cluster_of
from autopar.layouts.placement import Layout, Mesh, local_shape
from autopar.passes.lowering.chain import lowered_on, start_early
from autopar.passes.lowering.micro_batch_graphs import joined_bytes
from autopar.passes.lowering.stage import LoweredStage
from autopar.passes.stages.cut_stages import Crossing, StagePrograms
from autopar.passes.stages.once_per_step import PREPARED
from autopar.passes.stages.weight_gradients import BackwardGraphs
from autopar.planner.memory.step_bytes import prepared_bytes, total_bytes
from autopar.plans.busiest_rank import busiest_place
from autopar.plans.parallel_plan import Plan
from autopar.program import MicroProgram, Program, returned_values
from autopar.schedules.actions import Kind, PipeAction, Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedStage:
    """One lowered stage on one rank, and what prices it. cluster, mesh: what its collectives cross."""

    lowered: LoweredStage
    cluster: Cluster
    mesh: Mesh

    @property
    def number(self) -> int:
        """Of the stage, in the order of the model."""
        return self.lowered.number

    @property
    def plan(self) -> Plan:
        """The layouts of its ranks."""
        return self.lowered.plan

    @cached_property
    def live_ranges(self) -> list[LiveRange]:
        """Of one micro-batch; what a stage gathers once per step is not among them."""
        events = stage_memory_events if self.lowered.context.in_pipeline else memory_events
        return self._of_one_part(events(self.lowered.partition))

    @cached_property
    def ranges_of_halves(self) -> list[LiveRange]:
        """`live_ranges` where backward runs in two halves: of forward, of the half for inputs, of that for weights."""
        return [] if self.lowered.halves is None else self._of_halves(self.lowered.halves)

    def _of_halves(self, halves: BackwardGraphs) -> list[LiveRange]:
        kept = returned_values(halves.inputs.graph)[self.lowered.sent :]
        parts = replace(self.lowered.partition, backward=halves.inputs)
        return self._of_one_part(stage_memory_events(parts, halves.weights, kept))

    def _of_one_part(self, ranges: Sequence[LiveRange]) -> list[LiveRange]:
        if self.lowered.prepared is None:
            return list(ranges)
        return [live for live in ranges if not live.name.startswith(PREPARED)]

    @cached_property
    def bytes_of_passes(self) -> tuple[PassBytes, PassBytes]:
        """(forward, backward) of one micro-batch: activations, saved values, gathered parameters, gradients and inputs.

        What is left behind backward are gradients, nothing where they go into totals.
        """
        live = tuple(float(held) for held in bytes_over_time(self.live_ranges))
        end = self.turn + len(self.nodes("B"))
        live += (0.0,) * (1 + end - len(live))
        forward, backward = live[: self.turn], live[self.turn : end]
        saved = self._across(self.live_ranges, self.turn)
        left = 0.0 if self.lowered.context.adds_up else live[end]
        return PassBytes(live=forward, before=0.0, after=saved), PassBytes(live=backward, before=saved, after=left)

    @cached_property
    def bytes_of_halves(self) -> tuple[PassBytes, PassBytes]:
        """As `bytes_of_passes`, of the two halves of backward, behind which gradients are in totals."""
        start, border = self.first_node("I"), self.first_node("W")
        live = [float(held) for held in bytes_over_time(self.ranges_of_halves)]
        live += [0.0] * (border + len(self.nodes("W")) - len(live))
        saved, kept = (self._across(self.ranges_of_halves, place) for place in (start, border))
        return (
            PassBytes(live=tuple(live[start:border]), before=saved, after=kept),
            PassBytes(live=tuple(live[border:]), before=kept, after=0.0),
        )

    def bytes_of_end(self, kind: Kind) -> PassBytes:
        """The bytes of the first forward, or of the last pass of backward, of a step, whatever more they do; beside
        what is gathered once and whole totals, which end where they are summed.

        Without several stages the gathered ones end with that backward, so that what totals are summed to is left.
        """
        lowered, every = self.lowered, self.held(kind)
        if kind == "F" or lowered.last is None:
            return every
        totals, end = math.fsum(self.total_bytes.values()), self.first_node(kind) + len(lowered.last.graph.nodes) - 1
        live = [float(held) - totals for held in bytes_over_time(self._ranges_to_the_end(lowered.last))]
        left = sum(node_bytes(node) for node in returned_values(lowered.last.graph)) - totals
        live += [left] * (end - len(live))
        after = 0.0 if lowered.context.in_pipeline else left - math.fsum(self.gathered_bytes.values())
        return PassBytes(live=tuple(live[self.first_node(kind) : end]), before=every.before, after=after)

    def _ranges_to_the_end(self, last: fx.GraphModule) -> list[LiveRange]:
        """As `live_ranges`, or as `ranges_of_halves`, where backward ends with `last`."""
        lowered, halves = self.lowered, self.lowered.halves
        if not lowered.context.in_pipeline:
            return self._of_one_part(memory_events(replace(lowered.partition, backward=last)))
        if lowered.context.last_kind == "W" and halves is not None:
            return self._of_halves(replace(halves, weights=last))
        return self._of_one_part(stage_memory_events(replace(lowered.partition, backward=last)))

    def held(self, kind: Kind) -> PassBytes:
        """The bytes of a pass."""
        pair = self.bytes_of_passes if kind in ("F", "B") else self.bytes_of_halves
        return pair[kind in ("B", "W")]

    def nodes(self, kind: Kind) -> list[fx.Node]:
        """Of the graph of a pass, without its output."""
        parts, halves = self.lowered.partition, self.lowered.halves
        graph: fx.GraphModule | None = parts.forward if kind == "F" else parts.backward
        if kind in ("I", "W"):
            graph = None if halves is None else halves.inputs if kind == "I" else halves.weights
        return [] if graph is None else [node for node in graph.graph.nodes if node.op != "output"]

    def first_node(self, kind: Kind) -> int:
        """How many nodes live ranges count in front of those of a pass."""
        before: tuple[Kind, ...] = () if kind == "F" else ("F", "I") if kind == "W" else ("F",)
        return sum(len(self.nodes(each)) for each in before)

    @staticmethod
    def _across(ranges: Sequence[LiveRange], place: int) -> float:
        """Bytes of what lives in front of a node and at it."""
        return float(sum(live.bytes for live in ranges if live.first_index < place <= live.last_index))

    @cached_property
    def turn(self) -> int:
        """Nodes of forward: live ranges count those of backward from here on."""
        return self.first_node("B")

    @property
    def joined_bytes(self) -> float:
        """Bytes of outputs that wait for the other micro-batches; not counted where there are several stages."""
        context = self.lowered.context
        return 0.0 if context.in_pipeline else joined_bytes(context.micro, self.lowered.program)

    @cached_property
    def gathered_bytes(self) -> Mapping[str, float]:
        """Operator or parameter -> bytes of what is gathered once per step and stays for it."""
        return {} if self.lowered.prepared is None else prepared_bytes(self.lowered.prepared)

    @cached_property
    def total_bytes(self) -> Mapping[str, float]:
        """Parameter -> bytes of the total of its gradient, whole where the stage reduces it once per step."""
        return total_bytes(self.lowered)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepGraphs:
    """All stages of a plan, each on the first rank of its group, or at `place` there. cut: the whole program's;
    micro: how micro-batches make up the batch."""

    plan: Plan
    cluster: Cluster
    schedule: Schedule
    cut: StagePrograms
    micro: MicroProgram
    of: tuple[PricedStage, ...]
    send_seconds: tuple[float, ...]
    """From every stage to the next: what crosses the border in forward, of one rank."""
    near: frozenset[int]
    """The borders, by number, that lie inside of a node."""

    @property
    def holders(self) -> Mapping[str, frozenset[int]]:
        """Parameter -> the stages that hold it."""
        return self.cut.holders

    @property
    def crossings(self) -> Sequence[Crossing]:
        """The values that go from one stage to another."""
        return self.cut.crossings

    @property
    def passes(self) -> Schedule:
        """The schedule, without backward where the program has none."""
        return self.schedule if self.micro.program.training else self.schedule.forward_only

    def held_by(self, group: int) -> list[int]:
        """The stages of a rank group, in the order of the model."""
        return [stage for stage, holders in enumerate(self.schedule.holders) if group in holders]

    def last_passes(self, group: int) -> dict[int, PipeAction]:
        """Stage -> the last pass of its backward on a rank group, of the stages that start late sums with it or behind
        it."""
        passes = {action.stage: action for action in self.passes.ranks[group] if action.kind != "F"}
        lowered = {stage: self.of[stage].lowered for stage in passes}
        return {
            stage: action
            for stage, action in passes.items()
            if (lowered[stage].last or lowered[stage].ending) is not None
            and lowered[stage].context.last_kind == action.kind
        }

    def shared_gradients(self, group: int) -> tuple[list[int], float]:
        """(the rank groups with which a group adds up gradients of parameters that they hold too, seconds of it on one
        rank)."""
        beside, seconds = set[int](), 0.0
        for stage in self.held_by(group):
            for entry in self.of[stage].lowered.program.inputs:
                holders = self.holders.get(entry.name, frozenset()) if entry.role == "parameter" else frozenset()
                groups = {other for holder in holders for other in self.schedule.holders[holder]}
                if len(groups) > 1:
                    beside |= groups
                    nbytes = math.prod(entry.shape) * entry.dtype.itemsize
                    seconds += _border_seconds(self.plan, self.cluster, (min(holders), max(holders)), nbytes)
        return sorted(beside), seconds

    def message_bytes(self, group: int) -> list[float]:
        """What one rank of a group holds of messages beside each of its passes, in order: buffers of what the next pass
        receives, which is on its way meanwhile, and what the last pass that sends has sent, up to the next send."""
        actions, found, sent = self.passes.ranks[group], list[float](), 0.0
        for action, later in zip(actions, (*actions[1:], None), strict=True):
            found.append(sent + (0.0 if later is None else self._arriving_bytes(later)))
            sent = self._leaving_bytes(action) or sent
        return found

    def _arriving_bytes(self, action: PipeAction) -> float:
        found = self.cut.crossings_into(action.stage, action.kind != "F")
        return float(sum(_local_bytes(c, self.of[c.target].plan) for c in found if self._travels(c, action)))

    def _leaving_bytes(self, action: PipeAction) -> float:
        found = self.cut.crossings_from(action.stage, action.kind != "F")
        return float(sum(_local_bytes(c, self.of[c.source].plan) for c in found if self._travels(c, action)))

    def _travels(self, crossing: Crossing, action: PipeAction) -> bool:
        """Whether a pass gets a value from another rank group, or hands it to one."""
        ends = {self.schedule.rank_of(stage, action.micro_batch) for stage in (crossing.source, crossing.target)}
        return action.kind != "W" and len(ends) == 2

    def message(self, crossing: Crossing) -> tuple[int, float]:
        """(bytes, seconds) of a value on its way from one rank of a stage to its peer of another."""
        nbytes = _local_bytes(crossing, self.of[crossing.source].plan)
        return nbytes, _border_seconds(self.plan, self.cluster, (crossing.source, crossing.target), nbytes)


def step_graphs(
    plan: Plan, program: Program | MicroProgram, cluster: Cluster, place: int | None = None
) -> StepGraphs:
    """The stages of a plan. program: in its micro-batches; place: the number of a rank inside its group, the busiest
    one where none is given.

    Raises PlanMismatchError where the program cannot be cut so.
    """
    if place is None:
        place = busiest_place(plan, plan.layout_mesh, program if isinstance(program, Program) else program.program)
    ranks = [group.first_rank + place % group.size for group in plan.rank_groups]
    step = lowered_on(program, plan, ranks, until=start_early)
    found = []
    for stage in step.stages:
        on, mesh = _stands_on(plan, cluster, step.schedule.holders[stage.number][0])
        found.append(PricedStage(lowered=stage, cluster=on, mesh=mesh))
    return StepGraphs(
        plan=plan,
        cluster=cluster,
        schedule=step.schedule,
        cut=step.cut,
        micro=step.micro,
        of=tuple(found),
        send_seconds=tuple(_sends(plan, step.cut, found, cluster)),
        near=frozenset(e for e in range(len(found) - 1) if _between(plan, cluster, (e, e + 1))[0].nodes == 1),
    )


def _stands_on(plan: Plan, cluster: Cluster, group: int) -> tuple[Cluster, Mesh]:
    """The cluster and the mesh that price the collectives of a rank group."""
    if not plan.staged.groups:
        refuse_mixed(cluster, "a pipeline of equal rank groups" if plan.in_stages else "a step without stages")
        return cluster, plan.mesh
    own = plan.on_group(group).mesh
    return cluster_of(_part_of(plan, cluster, group), own.size), own


def _part_of(plan: Plan, cluster: Cluster, group: int) -> Cluster:
    """The part of a cluster of several kinds on which a rank group stands; else the cluster itself."""
    if not isinstance(cluster, MixedCluster):
        return cluster
    first = plan.rank_groups[group].first_rank
    return max(zip(cluster.first_ranks, cluster.parts, strict=True), key=lambda one: (one[0] <= first, one[0]))[1]


def _sends(plan: Plan, cut: StagePrograms, stages: list[PricedStage], cluster: Cluster) -> list[float]:
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
    groups = [plan.stages[stage].rank_group for stage in ends]
    if not plan.staged.groups:
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
