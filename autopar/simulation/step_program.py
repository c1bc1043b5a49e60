"""The program of a step for the simulator: every kernel and collective of a rank, pass by pass, as the runtime does.

plain      states | forward, backward of micro-batch 0 | ... of micro-batch m - 1 | optimizer
pipeline   states | gathers once per step | the schedule, on one rank per group | late sums | optimizer
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.cost_models.operator_costs import optimizer_seconds
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
from autopar.graphs.forward_backward import Partition
from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import Device
from autopar.passes.lowering.micro_batch_graphs import joined_bytes
from autopar.planner.one_mesh.predict import dispatch_seconds
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.planner.problem.optimizer_states import state_bytes
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import PIPELINE_AXIS
from autopar.program import MicroProgram, Program
from autopar.schedules.actions import Kind
from autopar.simulation.priced_stages import PricedStage, StepGraphs, step_graphs


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
        self._prices: dict[str, KernelPrices] = {}

    @cached_property
    def graphs(self) -> StepGraphs:
        """What the first rank of every rank group runs."""
        return step_graphs(self.plan, self.micro or self.program, self.cluster)

    # one program on all ranks

    def plain(self) -> list[Action]:
        """Every micro-batch forward and backward, then the optimizer."""
        stage = self.graphs.of[0].lowered
        joined = joined_bytes(self.graphs.micro, stage.program)
        states = self._states([stage.program], self.plan.micro_batches > 1, self.cluster.device)
        actions = [Action("states", COMPUTE, 0.0, allocates=states.bytes + joined)]
        passes = self._passes(stage.partition)
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

    def _pass(self, graph: fx.Graph, phase: str, held: PassBytes, on: PricedStage | None = None) -> PassProgram:
        return pass_program(self.actions(graph, phase, on=on, hands_on=on is not None), held,
                            wait_positions(graph.nodes))  # fmt: skip

    def actions(
        self, graph: fx.Graph, phase: str, *, on: PricedStage | None = None, hands_on: bool = False
    ) -> list[ProgramAction]:
        """Kernels and collectives (on: of a stage); on CPUs the dispatch of views, which costs what any small operator
        costs, and (hands_on) what the host does for a pass that hands on to another stage."""
        cluster, mesh = (self.cluster, self.mesh) if on is None else (on.cluster, on.mesh)
        found = program_actions(
            graph,
            phase,
            cluster=cluster,
            mesh=mesh,
            backend=self.plan.kernel_backend,
            prices=self._prices.setdefault(cluster.device.name, KernelPrices(device=cluster.device)),
            segment_of=str,
        )
        host = host_pass_seconds(cluster.device) if hands_on else 0.0
        if seconds := dispatch_seconds(graph, cluster.device) + host:
            found.append(ProgramAction(name=phase, phase=phase, stream=COMPUTE, seconds=seconds, kind="views",
                                       position=len(graph.nodes) - 2))  # fmt: skip
        return found

    def _states(self, programs: Sequence[Program], accumulates: bool, device: Device) -> _States:
        """accumulates: gradients have totals that live throughout."""
        held = traffic = 0.0
        updated = []
        entries = {entry.name: entry for program in programs for entry in program.inputs if entry.role == "parameter"}
        for name, entry in entries.items():
            state: StateBytes = self.state_bytes[name]
            elements = math.prod(entry.shape)
            size = float(elements * entry.dtype.itemsize)
            held += size + elements * (state.optimizer + (state.gradient if accumulates else 0.0))
            traffic += float(optimizer_seconds(device, elements * state.step_traffic))
            updated.append((size, state.step_buffers))
        return _States(held, step_buffer_bytes(updated, device.kind), traffic)

    def update_bytes(self, programs: Sequence[Program], device: Device) -> float:
        """What the optimizer's step takes for a while, of the parameters of these programs."""
        return self._states(programs, accumulates=True, device=device).step_bytes

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
        graphs = self.graphs
        schedule = graphs.schedule
        used = [{action.kind for actions in schedule.ranks for action in actions if action.stage == stage}
                for stage in range(schedule.num_stages)]  # fmt: skip
        found = [self._stage(stage, used[stage.number]) for stage in graphs.of]
        own = [graphs.held_by(rank) for rank in range(len(schedule.ranks))]
        states = [self._states_of([graphs.of[stage] for stage in held]) for held in own]
        actions: list[Action] = []
        for rank, held in enumerate(own):
            for stage in held:
                actions += _on(found[stage].before, rank, len(actions))
        shift = len(actions)
        played = pipeline_program(
            schedule,
            {(stage, kind): program for stage, each in enumerate(found) for kind, program in each.passes.items()},
            send_seconds=graphs.send_seconds,
            near=graphs.near,
            state_bytes=[each.bytes for each in states],
        )
        actions += [replace(a, depends_on=tuple(index + shift for index in a.depends_on)) for a in played]
        last = {action.rank: index for index, action in enumerate(actions) if action.stream == COMPUTE}
        for rank, held in enumerate(own):
            for stage in held:
                actions += _on(found[stage].behind, rank, len(actions), last[rank])
                last[rank] = len(actions) - 1 if found[stage].behind else last[rank]
        ended = dict(last)
        for rank in range(len(own)):
            groups, seconds = graphs.shared_gradients(rank) if self.program.training else ([], 0.0)
            if groups:
                needed, last[rank] = tuple(ended[group] for group in groups), len(actions)
                name = "shared gradients"
                actions.append(Action(name, PIPELINE_AXIS, seconds, needed, communication=True, rank=rank))
            actions += self._end(states[rank], rank, last[rank])
        return actions

    def _states_of(self, stages: Sequence[PricedStage]) -> _States:
        """Of the stages of one rank, with what they gather, and the rest of whole gradients, once per step."""
        programs = [stage.lowered.program for stage in stages]
        states = self._states(programs, accumulates=True, device=stages[0].cluster.device)
        more = 0.0
        for stage in stages:
            more += math.fsum(stage.gathered_bytes.values())
            if stage.lowered.prepared is not None:
                more += max(0.0, math.fsum(stage.total_bytes.values()) - self._gradient_bytes(stage.lowered.program))
        return replace(states, bytes=states.bytes + more)

    def _gradient_bytes(self, lowered: Program) -> float:
        parameters = [entry for entry in lowered.inputs if entry.role == "parameter"]
        return sum(math.prod(entry.shape) * self.state_bytes[entry.name].gradient for entry in parameters)

    def _stage(self, stage: PricedStage, kinds: set[Kind]) -> _Stage:
        prepared, halves, late = stage.lowered.prepared, stage.lowered.halves, stage.lowered.late
        forward = stage.lowered.partition.forward.graph
        before = () if prepared is None else tuple(self.actions(prepared.prepare.graph, "forward", on=stage))
        held, left = stage.bytes_of_passes
        passes: dict[Kind, PassProgram] = {"F": self._pass(forward, "forward", held, on=stage)}
        if halves is None:
            return _Stage(passes=passes, before=before)
        if "B" in kinds:
            passes["B"] = self._pass(halves.whole.graph, "backward", left, on=stage)
        if "I" in kinds:
            inputs, weights = (
                (
                    self.actions(half.graph, "backward", on=stage, hands_on=half is halves.inputs),
                    wait_positions(half.graph.nodes),
                )
                for half in (halves.inputs, halves.weights)
            )
            passes |= halves_of_backward(inputs, weights, left, stage.kept_bytes)
        behind = () if late is None else tuple(self.actions(late.reduce.graph, "backward", on=stage))
        return _Stage(passes=passes, before=before, behind=behind)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """before, behind: what a stage does once per step, in front of all passes and behind them."""

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


def _behind(program: PassProgram, first: int) -> list[Action]:
    """The actions of a pass behind the last of all actions before."""
    return [
        replace(action, depends_on=tuple(first + index for index in action.depends_on) or (first - 1,))
        for action in program.actions
    ]
