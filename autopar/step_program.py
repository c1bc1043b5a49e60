"""The program of a step for the simulator: every kernel and collective of a rank, pass by pass, as the runtime does.

plain      states | forward, backward of micro-batch 0 | ... of micro-batch m - 1 | optimizer
pipeline   states | gathers once per step | the schedule, on one rank per group | late sums | optimizer
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from autopar.cluster import Cluster, GroupTopology
from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.cost_models.operators import optimizer_seconds
from autopar.cost_models.optimizer_step import step_buffer_bytes
from autopar.cost_models.pipeline_program import PassProgram, pipeline_program
from autopar.cost_models.program_costs import COMPUTE, ProgramAction, program_actions
from autopar.cost_models.program_timeline import (
    PassBytes,
    bytes_of_passes,
    halves_of_backward,
    pass_program,
    wait_positions,
)
from autopar.cost_models.simulator import Action
from autopar.cost_models.stage_costs import host_pass_seconds
from autopar.errors import ConfigurationError
from autopar.layout import Mesh, local_shape
from autopar.parallel_plan import Plan
from autopar.passes.emitter import node_bytes
from autopar.passes.late_sums import cut_late_sums
from autopar.passes.lower import lower
from autopar.passes.micro_batches import for_micro_batches, joined_bytes
from autopar.passes.once_per_step import prepare_parameters
from autopar.passes.overlap import overlapped
from autopar.passes.partition import Partition, split_forward_backward
from autopar.passes.stage_plans import stage_plan
from autopar.passes.stages import StagePrograms, cut_stages
from autopar.passes.weight_gradients import split_backward
from autopar.planner.leaves import StateBytes
from autopar.planner.optimizers import state_bytes
from autopar.planner.predict import dispatch_seconds
from autopar.program import MicroProgram, Program, returned_values
from autopar.schedules.actions import Kind


@dataclass(frozen=True, slots=True)
class _States:
    """Of the parameters that a rank holds: bytes, those of the optimizer's step, and its seconds."""

    bytes: float
    step_bytes: float
    step_seconds: float


class StepProgram:
    """The actions of a plan's step: `plain` where all ranks run one program, `pipeline` where stages do."""

    def __init__(self, plan: Plan, program: Program | MicroProgram, cluster: Cluster, optimizer: Any) -> None:
        self.plan, self.cluster, self.mesh = plan, cluster, plan.mesh
        self.micro = program if isinstance(program, MicroProgram) else None
        self.program = program.program if isinstance(program, MicroProgram) else program
        self.state_bytes = state_bytes(self.program, optimizer, cluster.device.kind)
        self.recomputed = [name for name, operator in plan.operators.items() if operator.recompute]
        self.price = partial(
            program_actions,
            cluster=cluster,
            mesh=plan.mesh,
            backend=plan.kernel_backend,
            prices=KernelPrices(device=cluster.device),
            segment_of=str,
        )

    # one program on all ranks

    def plain(self) -> list[Action]:
        """Every micro-batch forward and backward, then the optimizer."""
        lowered = lower(self.program, self.plan, rank=0)
        partition = split_forward_backward(lowered, self.recomputed)
        joined = 0.0
        if self.micro is not None:
            partition = for_micro_batches(lowered, partition).partition
            joined = joined_bytes(self.micro, lowered)
        partition = overlapped(partition, self.plan.bucket_bytes, self.plan.product_chunks)
        states = self._states([lowered], self.plan.micro_batches > 1)
        actions = [Action("states", COMPUTE, 0.0, allocates=states.bytes + joined)]
        passes = self._passes(partition)
        for _ in range(self.plan.micro_batches):
            for program in passes:
                actions += _behind(program, len(actions))
        return [*actions, *self._end(states, rank=0, after=len(actions) - 1)]

    def _passes(self, partition: Partition) -> list[PassProgram]:
        held = bytes_of_passes(partition)
        found = [self._pass(partition.forward.graph, "forward", held[0])]
        if partition.backward is not None:
            late = held[1] if self.plan.micro_batches == 1 else replace(held[1], after=0.0)
            found.append(self._pass(partition.backward.graph, "backward", late))
        return found

    def _pass(self, graph: fx.Graph, phase: str, held: PassBytes, *, hands_on: bool = False) -> PassProgram:
        return pass_program(self._actions(graph, phase, hands_on=hands_on), held, wait_positions(graph.nodes))

    def _actions(self, graph: fx.Graph, phase: str, *, hands_on: bool = False) -> list[ProgramAction]:
        """Kernels and collectives; on CPUs the dispatch of views, which costs what any small operator costs, and
        (hands_on) what the host does for a pass that hands on to another stage."""
        found = self.price(graph, phase)
        host = host_pass_seconds(self.cluster.device) if hands_on else 0.0
        if seconds := dispatch_seconds(graph, self.cluster.device) + host:
            found.append(ProgramAction(name=phase, phase=phase, stream=COMPUTE, seconds=seconds, kind="views",
                                       position=len(graph.nodes) - 2))  # fmt: skip
        return found

    def _states(self, programs: Sequence[Program], accumulates: bool) -> _States:
        """accumulates: gradients have totals that live throughout."""
        held = traffic = 0.0
        updated = []
        entries = {entry.name: entry for program in programs for entry in program.inputs if entry.role == "parameter"}
        for name, entry in entries.items():
            state: StateBytes = self.state_bytes[name]
            elements = math.prod(entry.shape)
            size = float(elements * entry.dtype.itemsize)
            held += size + elements * (state.optimizer + (state.gradient if accumulates else 0.0))
            traffic += float(optimizer_seconds(self.cluster.device, elements * state.step_traffic))
            updated.append((size, state.step_buffers))
        return _States(held, step_buffer_bytes(updated, self.cluster.device.kind), traffic)

    def _end(self, states: _States, rank: int, after: int) -> list[Action]:
        if not self.program.training:
            return []
        return [
            Action(
                "optimizer", COMPUTE, states.step_seconds, (after,), rank=rank, allocates=states.step_bytes,
                frees=states.step_bytes,
            )
        ]  # fmt: skip

    # stages

    def pipeline(self) -> list[Action]:
        """One rank of every rank group: what is made once, the passes of the schedule, late sums, the optimizer."""
        pipeline = self.plan.pipeline
        assert pipeline is not None
        if pipeline.groups:
            raise ConfigurationError("rank groups of unequal shapes are not simulated; the plan holds their prediction")
        schedule = pipeline.built(self.plan.micro_batches)
        cuts = [stage.last_operator for stage in pipeline.stages if stage.last_operator is not None]
        stages = cut_stages(self.program, cuts)
        used = [{action.kind for actions in schedule.ranks for action in actions if action.stage == stage}
                for stage in range(schedule.num_stages)]  # fmt: skip
        plans = [stage_plan(self.plan, stages, schedule, ranks[0]) for ranks in schedule.holders]
        found = [self._stage(stage, plans[stage], stages, used[stage]) for stage in range(schedule.num_stages)]
        own = [[stage for stage, ranks in enumerate(schedule.holders) if rank in ranks]
               for rank in range(len(schedule.ranks))]  # fmt: skip
        states = [self._states([found[stage].lowered for stage in held], accumulates=True) for held in own]
        actions: list[Action] = []
        for rank, held in enumerate(own):
            for stage in held:
                actions += _on(found[stage].before, rank, len(actions))
        shift = len(actions)
        played = pipeline_program(
            schedule,
            {(stage, kind): program for stage, each in enumerate(found) for kind, program in each.passes.items()},
            send_seconds=self._sends(stages, plans),
            state_bytes=[each.bytes for each in states],
        )
        actions += [replace(a, depends_on=tuple(index + shift for index in a.depends_on)) for a in played]
        last = {action.rank: index for index, action in enumerate(actions) if action.stream == COMPUTE}
        for rank, held in enumerate(own):
            for stage in held:
                actions += _on(found[stage].behind, rank, len(actions), last[rank])
                last[rank] = len(actions) - 1 if found[stage].behind else last[rank]
            actions += self._end(states[rank], rank, last[rank])
        return actions

    def _stage(self, stage: int, own: Plan, stages: StagePrograms, kinds: set[Kind]) -> _Stage:
        """The graphs that the runtime makes of a stage (`runtime/emit_pipeline.py`). Gradients of parameters go into
        totals, so nothing is left behind backward."""
        assert self.plan.pipeline is not None
        once = self.plan.pipeline.stages[stage].gather_once
        lowered = lower(stages.programs[stage], own, rank=0)
        partition = split_forward_backward(lowered, self.recomputed)
        prepared = prepare_parameters(partition) if once else None
        if prepared is not None:
            partition = replace(partition, forward=prepared.forward, backward=prepared.backward)
        before = () if prepared is None else tuple(self._actions(prepared.prepare.graph, "forward"))
        if partition.backward is None:
            forward = self._pass(partition.forward.graph, "forward", bytes_of_passes(partition)[0], hands_on=True)
            return _Stage(lowered=lowered, passes={"F": forward}, before=before)
        sent = len([o for o in lowered.outputs if o.role == "gradient" and o.name not in stages.holders])
        late = cut_late_sums(partition.backward, sent, growing=once)
        halves = split_backward(partition.backward if late is None else late.unreduced, sent)
        held, left = bytes_of_passes(replace(partition, backward=halves.whole))
        left = replace(left, after=0.0)
        passes: dict[Kind, PassProgram] = {"F": self._pass(partition.forward.graph, "forward", held, hands_on=True)}
        if "B" in kinds:
            passes["B"] = self._pass(halves.whole.graph, "backward", left, hands_on=True)
        if "I" in kinds:
            kept = set(returned_values(halves.inputs.graph)[sent:])
            kept_bytes = float(sum(node_bytes(node) for node in kept if node.name not in partition.parameters))
            inputs, weights = (
                (
                    self._actions(half.graph, "backward", hands_on=half is halves.inputs),
                    wait_positions(half.graph.nodes),
                )
                for half in (halves.inputs, halves.weights)
            )
            passes |= halves_of_backward(inputs, weights, left, kept_bytes)
        behind = () if late is None else tuple(self._actions(late.reduce.graph, "backward"))
        return _Stage(lowered=lowered, passes=passes, before=before, behind=behind)

    def _sends(self, stages: StagePrograms, plans: Sequence[Plan]) -> list[float]:
        """Seconds from each stage to the next: what crosses the border in forward, of one rank."""
        topology = GroupTopology.of(self.cluster, self.mesh.shape, (0,)).border
        found = []
        for border in range(len(stages.programs) - 1):
            crossing = [c for c in stages.crossings if not c.is_backward and c.source <= border < c.target]
            own, names = plans[border], {c.name: c for c in crossing}
            nbytes = sum(_local_bytes(c.node, own.inputs[c.name], own.mesh) for c in names.values())
            found.append(float(collective_seconds("neighbours", nbytes, topology, self.cluster)))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """before, behind: what a stage does once per step, in front of all passes and behind them."""

    lowered: Program
    passes: Mapping[Kind, PassProgram]
    before: tuple[ProgramAction, ...] = ()
    behind: tuple[ProgramAction, ...] = ()


def _on(actions: Sequence[ProgramAction], rank: int, first: int, after: int = -1) -> list[Action]:
    """Actions of one rank that follow each other, the first of them behind the action `after`."""
    return [
        Action(
            f"{action.name}: {action.kind}",
            action.stream,
            action.seconds,
            depends_on=(first + index - 1,) if index else () if after < 0 else (after,),
            communication=action.stream != COMPUTE,
            rank=rank,
        )
        for index, action in enumerate(actions)
    ]


def _local_bytes(node: fx.Node, layout: Any, mesh: Mesh) -> int:
    value = node.meta["val"]
    return math.prod(local_shape(value.shape, layout, mesh, mesh.coordinate(0))) * int(value.dtype.itemsize)


def _behind(program: PassProgram, first: int) -> list[Action]:
    """The actions of a pass behind the last of all actions before."""
    return [
        replace(action, depends_on=tuple(first + index for index in action.depends_on) or (first - 1,))
        for action in program.actions
    ]
