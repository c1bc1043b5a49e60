"""The program of a step for the simulator: every kernel and collective of a rank, pass by pass, as the runtime does.

    gathers once per step | states | the schedule, on one rank per group | late sums | optimizer

A plan without stages has one, whose schedule is 0F0 0B0 0F1 0B1 ... on one rank group; gathers are in its first forward
and late sums in its last backward. In a pipeline the last backward of a stage starts them, and all are awaited behind
the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from autopar.cost_models.copy_costs import host_optimizer_seconds
from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.cost_models.optimizer_step import step_buffer_bytes
from autopar.cost_models.pipeline_program import SENDS, PassProgram, pipeline_program
from autopar.cost_models.program_costs import COMPUTE, ProgramAction, program_actions
from autopar.cost_models.program_timeline import PassBytes, issued, pass_program
from autopar.cost_models.simulator import ALONE, Action, Interference, simulate
from autopar.cost_models.stage_costs import host_pass_seconds
from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import Device
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.rungs import Rungs
from autopar.planner.memory.time_segments import module_segments
from autopar.planner.one_mesh.predict import dispatch_seconds
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.planner.problem.optimizer_states import state_bytes
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import PIPELINE_AXIS
from autopar.program import Input, MicroProgram, Program
from autopar.schedules.actions import Kind, PipeAction
from autopar.simulation.bodies import Body, Turn
from autopar.simulation.priced_stages import PricedStage, StepGraphs, step_graphs

ON_THE_HOST = "optimizer on the host"
"""Its step for parameters that lie there, while the device waits."""


@dataclass(frozen=True, slots=True)
class _States:
    """Of the parameters that a rank holds: bytes on the device, those of the optimizer's step, and its seconds."""

    bytes: float
    step_bytes: float
    step_seconds: float
    host_seconds: float = 0.0
    """Of the step of those that lie on the host."""


class StepProgram:
    """What plays and prices the step of a plan."""

    def __init__(self, plan: Plan, program: Program | MicroProgram, cluster: Cluster, optimizer: Any) -> None:
        self.plan, self.cluster = plan, cluster
        self.micro = program if isinstance(program, MicroProgram) else None
        self.program = program.program if isinstance(program, MicroProgram) else program
        self.state_bytes = state_bytes(self.program, optimizer, cluster.device.kind)
        self._prices: dict[str, KernelPrices] = {}

    @cached_property
    def graphs(self) -> StepGraphs:
        """What the first rank of every rank group runs."""
        return step_graphs(self.plan, self.micro or self.program, self.cluster)

    @cached_property
    def rungs(self) -> Rungs:
        """By which ways backward comes to what it reads of forward."""
        return Rungs.of(self.plan, Lifetimes(self.program, module_segments))

    @property
    def beside(self) -> Interference:
        """How much longer products take beside collectives. A pipeline is played without: its passes are, alone."""
        return ALONE if self.plan.in_stages else self._slowdown

    @property
    def _slowdown(self) -> Interference:
        return Interference(compute=self.cluster.overlap_slowdown)

    def actions(self, free: str | None = None) -> list[Action]:
        """One rank of every rank group: what is made once, the passes of the schedule, late sums, the optimizer. free:
        a rung of the memory ladder; what the program has for its sake then takes no time."""
        graphs, schedule = self.graphs, self.graphs.passes
        bodies = [
            {body.turn: body for body in self.bodies(stage, schedule.kinds(stage.number), free)} for stage in graphs.of
        ]
        own = [graphs.held_by(rank) for rank in range(len(schedule.ranks))]
        states = [self._states_of([graphs.of[stage] for stage in held]) for held in own]
        actions: list[Action] = []
        for rank, held in enumerate(own):
            for stage in held if self.plan.in_stages else ():
                actions += _once(bodies[stage].get("prepare"), rank, len(actions))
        shift = len(actions)
        programs = [dict(self._passes(stage, own)) for stage, own in zip(graphs.of, bodies, strict=True)]
        played = pipeline_program(
            schedule,
            {key: program for each in programs for key, program in each.items()},
            send_seconds=graphs.send_seconds,
            near=graphs.near,
            state_bytes=[each.bytes for each in states],
            message_bytes=[graphs.message_bytes(rank) for rank in range(len(schedule.ranks))],
            in_turn=not self.plan.in_stages,
            others=self._others(bodies, free) if self.plan.in_stages else self._ends(graphs.of[0], free),
        )
        actions += [replace(a, depends_on=tuple(index + shift for index in a.depends_on)) for a in played]
        last = {action.rank: index for index, action in enumerate(actions) if action.stream == COMPUTE}
        for rank, held in enumerate(own):
            started = graphs.last_passes(rank) if self.plan.in_stages else {}
            if started:
                flying = [index for stream, index in _last_of_streams(actions, rank) if stream not in SENDS]
                actions.append(Action("late sums", COMPUTE, 0.0, tuple(flying), rank=rank))
                last[rank] = len(actions) - 1
            for stage in held if self.plan.in_stages else ():
                late = _once(None if stage in started else bodies[stage].get("late"), rank, len(actions), last[rank])
                actions += late
                last[rank] = len(actions) - 1 if late else last[rank]
        ended = dict(last)
        for rank in range(len(own)):
            groups, seconds = graphs.shared_gradients(rank) if self.program.training else ([], 0.0)
            if groups:
                needed, last[rank] = tuple(ended[group] for group in groups), len(actions)
                name = "shared gradients"
                actions.append(Action(name, PIPELINE_AXIS, seconds, needed, communication=True, rank=rank))
            actions += self._end(states[rank], rank, last[rank], len(actions))
        return actions

    def bodies(self, stage: PricedStage, kinds: Collection[Kind], free: str | None = None) -> Iterator[Body]:
        """Every graph that a stage runs, in the order in which a step first does. kinds: of its passes in the
        schedule; free: as of `actions`."""
        for body in self._priced_bodies(stage, kinds):
            yield body if free is None else self._without(free, body)

    def _without(self, rung: str, body: Body) -> Body:
        """What a graph takes where the nodes that it has for the sake of a rung cost nothing. Kernels are told by their
        first node."""
        nodes, in_backward = list(body.graph.nodes), body.turn not in ("prepare", "first", "F")
        actions = [
            replace(one, seconds=0.0, host_seconds=0.0)
            if one.kind != "views" and self.rungs.added(nodes[one.position], in_backward) == rung
            else one
            for one in body.actions
        ]
        return replace(body, actions=actions)

    def _priced_bodies(self, stage: PricedStage, kinds: Collection[Kind]) -> Iterator[Body]:
        lowered, hands_on = stage.lowered, stage.lowered.context.in_pipeline
        halves, backward = lowered.halves, lowered.partition.backward
        if lowered.prepared is not None:
            yield self._body("prepare", stage, lowered.prepared.prepare)
        yield self._body("F", stage, lowered.partition.forward, hands_on)
        if backward is not None and "B" in kinds:
            yield self._body("B", stage, backward, hands_on)
        if halves is not None and "I" in kinds:
            yield self._body("I", stage, halves.inputs, hands_on)
            yield self._body("W", stage, halves.weights)
        if lowered.late is not None:
            yield self._body("late", stage, lowered.late.reduce)
        if lowered.ending is not None:
            yield self._body("ending", stage, lowered.ending)

    def ends(self, stage: PricedStage, free: str | None = None) -> dict[PipeAction, Body]:
        """The first forward and the last backward of a step without several stages, where they do more than others."""
        lowered, last = stage.lowered, stage.lowered.context.micro.count - 1
        found: list[tuple[PipeAction, Turn, fx.GraphModule | None]] = [
            (PipeAction(stage.number, "F", 0), "first", lowered.first),
            (PipeAction(stage.number, "B", last), "last", lowered.last),
        ]
        bodies = {action: self._body(turn, stage, graph) for action, turn, graph in found if graph is not None}
        return bodies if free is None else {action: self._without(free, body) for action, body in bodies.items()}

    def last_passes(self, rank: int, free: str | None = None) -> dict[PipeAction, Body]:
        """The last pass of backward of every stage of a pipeline on a rank group that has its late sums in it."""
        bodies = {
            action: self._body("last", stage, stage.lowered.last, hands_on=action.kind != "W")
            for stage, action in self._ending(rank)
            if stage.lowered.last is not None
        }
        return bodies if free is None else {action: self._without(free, body) for action, body in bodies.items()}

    def _ending(self, rank: int) -> Iterator[tuple[PricedStage, PipeAction]]:
        return ((self.graphs.of[stage], action) for stage, action in self.graphs.last_passes(rank).items())

    def _ends(self, stage: PricedStage, free: str | None) -> dict[PipeAction, PassProgram]:
        """`ends`, with the bytes that they bring."""
        return {
            action: pass_program(body.actions, stage.bytes_of_end(action.kind), body.waits)
            for action, body in self.ends(stage, free).items()
        }

    def _others(self, bodies: Sequence[Mapping[Turn, Body]], free: str | None) -> dict[PipeAction, PassProgram]:
        """The last passes of backward of a pipeline's stages, with the sums that they start, or that start behind them.
        bodies: of every stage."""
        found = {}
        for rank in range(len(self.graphs.passes.ranks)):
            last = self.last_passes(rank, free)
            for stage, action in self._ending(rank):
                body = last.get(action) or bodies[stage.number][action.kind]
                program = self._program(body, stage.bytes_of_end(action.kind))
                found[action] = program if action in last else _followed(program, bodies[stage.number]["late"])
        return found

    def _passes(
        self, stage: PricedStage, bodies: Mapping[Turn, Body]
    ) -> Iterator[tuple[tuple[int, Kind], PassProgram]]:
        """((stage, kind), program) of the passes of a stage, with the bytes that they bring."""
        kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
        for kind in kinds:
            if kind in bodies:
                yield (stage.number, kind), self._program(bodies[kind], stage.held(kind))

    def _program(self, body: Body, held: PassBytes) -> PassProgram:
        """A pass as it is played; of a pipeline with its kernels as long as they take beside its own collectives."""
        program = pass_program(body.actions, held, body.waits)
        if not self.plan.in_stages or self._slowdown == ALONE:
            return program
        alone = simulate(program.actions, self._slowdown)
        lengths = [end - start for start, end in alone.intervals]
        actions = [replace(one, seconds=length) for one, length in zip(program.actions, lengths, strict=True)]
        return PassProgram(tuple(actions), program.output)

    def _body(self, turn: Turn, stage: PricedStage, module: fx.GraphModule, hands_on: bool = False) -> Body:
        """Kernels and collectives; on CPUs the dispatch of views, which costs what any small operator costs, and
        (hands_on) what the host does for a pass that hands on to another stage."""
        graph, device = module.graph, stage.cluster.device
        phase = "forward" if turn in ("prepare", "first", "F") else "backward"
        actions = program_actions(
            graph,
            phase,
            cluster=stage.cluster,
            mesh=stage.mesh,
            backend=self.plan.kernel_backend,
            prices=self._prices.setdefault(device.name, KernelPrices(device=device)),
            segment_of=str,
        )
        host = host_pass_seconds(device) if hands_on else 0.0
        if seconds := dispatch_seconds(graph, device) + host:
            actions.append(ProgramAction(name=phase, phase=phase, stream=COMPUTE, seconds=seconds, kind="views",
                                         position=len(graph.nodes) - 2))  # fmt: skip
        return Body(turn, stage, graph, actions)

    def _states(self, programs: Sequence[Program], kept_totals: int, device: Device) -> _States:
        """kept_totals: how many sums of a gradient live throughout."""
        held = traffic = host_traffic = 0.0
        updated = []
        entries = {entry.name: entry for program in programs for entry in program.inputs if entry.role == "parameter"}
        for name, entry in entries.items():
            state: StateBytes = self.state_bytes[name]
            elements = math.prod(entry.shape)
            if entry.on_host:
                host_traffic += elements * state.step_traffic
                continue
            size = float(elements * entry.dtype.itemsize)
            held += size + elements * (state.optimizer + kept_totals * state.gradient)
            traffic += float(state.step_seconds(device, elements))
            updated.append((size, state.step_buffers))
        return _States(held, step_buffer_bytes(updated, device.kind), traffic, self._seconds_on_host(host_traffic))

    def _seconds_on_host(self, traffic: float) -> float:
        if not traffic or self.cluster.host is None:
            return 0.0
        return float(host_optimizer_seconds(self.cluster.host, traffic, self.cluster.devices_per_node))

    def update_bytes(self, programs: Sequence[Program], device: Device) -> float:
        """What the optimizer's step takes for a while, of the parameters of these programs."""
        return self._states(programs, kept_totals=1, device=device).step_bytes

    def optimizer_parts(self, stages: Sequence[PricedStage]) -> dict[str, float]:
        """Parameter -> seconds of the optimizer on the rank that holds these stages; each parameter counts once."""
        if not self.program.training:
            return {}
        return {
            entry.name: self._update_seconds(entry, stage.cluster.device)
            for stage in stages
            for entry in stage.lowered.program.inputs
            if entry.role == "parameter"
        }

    def _update_seconds(self, entry: Input, device: Device) -> float:
        elements, state = math.prod(entry.shape), self.state_bytes[entry.name]
        if entry.on_host:
            return self._seconds_on_host(elements * state.step_traffic)
        return float(state.step_seconds(device, elements))

    def _end(self, states: _States, rank: int, after: int, first: int) -> list[Action]:
        """first: the number of the first action that is returned."""
        if not self.program.training:
            return []
        found = [
            Action(
                "optimizer", COMPUTE, states.step_seconds, (after,), rank=rank, allocates=states.step_bytes,
                frees=states.step_bytes,
            )
        ]  # fmt: skip
        if states.host_seconds:
            found.append(Action(ON_THE_HOST, COMPUTE, states.host_seconds, (first,), rank=rank))
        return found

    def _states_of(self, stages: Sequence[PricedStage]) -> _States:
        """Of the stages of one rank, with what they gather, and the rest of whole gradients, once per step."""
        programs = [stage.lowered.program for stage in stages]
        states = self._states(programs, stages[0].lowered.context.kept_totals, stages[0].cluster.device)
        more = 0.0
        for stage in stages:
            more += stage.joined_bytes
            more += math.fsum(stage.gathered_bytes.values())
            if stage.lowered.prepared is not None or stage.lowered.last is not None:
                more += max(0.0, math.fsum(stage.total_bytes.values()) - self._gradient_bytes(stage.lowered.program))
        return replace(states, bytes=states.bytes + more)

    def _gradient_bytes(self, lowered: Program) -> float:
        parameters = [entry for entry in lowered.inputs if entry.role == "parameter"]
        return sum(math.prod(entry.shape) * self.state_bytes[entry.name].gradient for entry in parameters)


def _followed(program: PassProgram, sums: Body) -> PassProgram:
    """A pass with the sums that start behind it, while what it makes is sent."""
    first = len(program.actions)
    output = range(first)[program.output]
    started = [
        replace(one, depends_on=tuple(first + index for index in one.depends_on) or (output,))
        for one in issued(sums.actions, sums.waits)
    ]
    return PassProgram((*program.actions, *started), output)


def _last_of_streams(actions: Sequence[Action], rank: int) -> Iterable[tuple[str, int]]:
    """(stream, its last action) of a rank."""
    return {action.stream: index for index, action in enumerate(actions) if action.rank == rank}.items()


def _once(body: Body | None, rank: int, first: int, after: int = -1) -> list[Action]:
    """What one rank does once per step, one action after the other, the first of them behind the action `after`."""
    return [
        Action(
            f"{action.name}: {action.kind}",
            action.stream,
            action.seconds,
            depends_on=(first + index - 1,) if index else () if after < 0 else (after,),
            communication=action.stream != COMPUTE,
            rank=rank,
        )
        for index, action in enumerate(() if body is None else body.actions)
    ]
