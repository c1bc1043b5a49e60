"""The pipeline of a plan on one rank: the actions of its schedule, one after the other, between wires.

    loss = module(batch)       0F0, 0F1, 0B0, 0F2, ...: all micro-batches through the stages of this rank
    loss.backward()            hands out the gradients, times the incoming gradient of the loss

A rank holds the parameters of its own stages. Gradients are added up over micro-batches where they are made; those of a
parameter of several stages are added across their ranks at the end. Loss and outputs come back on every rank, broadcast
by the ranks of the stage that makes them. A stage that stands on two ranks takes every micro-batch on one of them, and
its parameters are shared like any that several ranks hold. Without gradients only the forward passes of the schedule run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from autopar.layout import local_shape
from autopar.parallel_plan import Plan
from autopar.passes.stages import StagePrograms
from autopar.program import Input, MicroProgram, Output, Program
from autopar.runtime.accumulation import HeldGradients
from autopar.runtime.batch_parts import BatchParts, scaled
from autopar.runtime.differentiable_parts import BindPart, run_differentiably
from autopar.runtime.emit import local_tensor, output_layout
from autopar.runtime.kernels import GraphCall
from autopar.runtime.parameters import StageParameters
from autopar.runtime.pipeline_wires import Form, Message, Wires, message_order
from autopar.runtime.process_groups import StageProcesses, rank
from autopar.runtime.stage_graphs import StageGraphs, zero_totals
from autopar.runtime.step import Bind
from autopar.schedules.actions import PipeAction, Schedule


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """The `Step` of a plan with stages. lowered: this rank's inputs and gradients, without a graph of its own; graphs:
    of its stages; statistics: their graph and its inputs; forms: what crosses; shared: parameter of stages on several
    rank groups -> the processes that add up its gradient."""

    micro: MicroProgram
    lowered: Program
    plan: Plan
    groups: StageProcesses
    stages: StagePrograms
    graphs: Mapping[int, StageGraphs]
    statistics: tuple[GraphCall, tuple[Input, ...]] | None
    schedule: Schedule
    forms: Mapping[str, Form]
    gradient_forms: Mapping[str, Form]
    shared: Mapping[str, dist.ProcessGroup]
    stage_parameters: StageParameters

    @property
    def program(self) -> Program:
        """Of one micro-batch."""
        return self.micro.program

    @property
    def whole(self) -> Program:
        """Of the whole batch."""
        return self.micro.whole

    @property
    def parts(self) -> BatchParts:
        """How the batch is cut, and outputs joined."""
        return BatchParts(micro=self.micro, plan=self.plan, groups=self.groups)

    @property
    def forward_outputs(self) -> tuple[Output, ...]:
        """Loss and outputs of the whole: what a call returns."""
        return tuple(output for output in self.program.outputs if output.role in ("loss", "output"))

    def __call__(
        self, leaves: Sequence[Any], bind: Bind, held: HeldGradients, *, axes: Sequence[int], local: bool
    ) -> tuple[torch.Tensor, ...]:
        """As `Step` says. Raises ConfigurationError where local parts do not split."""
        part_of = self.parts.split(axes, local)

        def bound(part: int) -> list[torch.Tensor]:
            return bind(part_of(leaves, part))

        if not self.program.training or not torch.is_grad_enabled():
            return self._run(bound, axes, {}, self.forward_only)
        parameters = [
            tensor for tensor, value in zip(bound(0), self.bound_inputs, strict=True) if value.role == "parameter"
        ]
        return run_differentiably(self, held, bound, axes, parameters)

    @cached_property
    def bound_inputs(self) -> tuple[Input, ...]:
        """The inputs that `Bind` gives, in order."""
        return self.lowered.inputs

    @cached_property
    def forward_only(self) -> Schedule:
        """The forward passes of the schedule."""
        return Schedule(tuple(tuple(a for a in actions if a.kind == "F") for actions in self.schedule.ranks))

    @cached_property
    def orders(self) -> dict[bool, list[Message]]:
        """Whether gradients are wanted -> the order of all messages."""
        sends = {
            (stage, backward): [(c.name, c.target) for c in self.stages.crossings_from(stage, backward)]
            for stage in range(self.schedule.num_stages)
            for backward in (False, True)
        }
        return {True: message_order(self.schedule, sends), False: message_order(self.forward_only, sends)}

    def run_with_gradients(
        self, bind: BindPart, axes: Sequence[int]
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor | None]]:
        """(results, one complete gradient of the loss per gradient of `lowered`)."""
        totals = zero_totals(
            {n: (form.shape, form.dtype) for n, form in self.gradient_forms.items()}, self.groups.device
        )
        results = self._run(bind, axes, totals, self.schedule)
        for name, group in self.shared.items():
            dist.all_reduce(totals[name], group=group)
        return results, [totals[output.name] for output in self.lowered.outputs]

    def _run(
        self, bind: BindPart, axes: Sequence[int], totals: dict[str, torch.Tensor], schedule: Schedule
    ) -> tuple[torch.Tensor, ...]:
        pieces = self.parts.pieces(axes)
        order = self.orders[schedule is self.schedule]
        wires = Wires(order, self.groups.group, self.groups.peers, self.forms, self.groups.device)
        run = _Run(step=self, bind=bind, pieces=pieces, totals=totals, wires=wires)
        run.whole_statistics = self._statistics(bind)
        run.actions(schedule.ranks[self.groups.group])
        wires.finish()
        return tuple(self._everywhere(output, run.results[output.name], axes) for output in self.forward_outputs)

    def _statistics(self, bind: BindPart) -> dict[str, torch.Tensor]:
        """The statistics of the whole batch, by name."""
        if self.statistics is None:
            return {}
        compute, inputs = self.statistics
        sums: list[torch.Tensor] = []
        for part in range(self.micro.count):
            values = named(self.bound_inputs, bind(part))
            found = compute([values[value.name] for value in inputs])
            sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else list(found)
        names = [output.name for output in self.program.outputs if output.role == "statistic"]
        return {n: scaled(value, self.micro.statistic_scales[n]) for n, value in zip(names, sums, strict=True)}

    def _everywhere(self, output: Output, own: Mapping[int, torch.Tensor], axes: Sequence[int]) -> torch.Tensor:
        """The local block of a result of the whole batch, from the ranks that have it. own: what this rank made."""
        stage = self.stages.owners[output.name]
        sources = self.schedule.holders[stage]
        if len(sources) > 1:
            return self.parts.join(output, self._parts_everywhere(output.name, own), axes)
        if own:
            value = self.parts.join(output, [own[part] for part in sorted(own)], axes).contiguous()
        else:
            shape = self._local_shape(self.whole, output.name)
            value = torch.empty(shape, dtype=self._dtype(output.name), device=self.groups.device)
        self._broadcast(value, sources[0])
        return value

    def _parts_everywhere(self, name: str, own: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """The result of every micro-batch, from the ranks that take it through the stage that makes it."""
        stage, found = self.stages.owners[name], dict[int, torch.Tensor]()
        for source in self.schedule.holders[stage]:
            parts = [part for part in range(self.micro.count) if self.schedule.rank_of(stage, part) == source]
            if source == self.groups.group:
                values = torch.stack([own[part] for part in parts])
            else:
                shape = (len(parts), *self._local_shape(self.program, name))
                values = torch.empty(shape, dtype=self._dtype(name), device=self.groups.device)
            self._broadcast(values, source)
            found |= dict(zip(parts, values.unbind(), strict=True))
        return [found[part] for part in sorted(found)]

    def _broadcast(self, value: torch.Tensor, source: int) -> None:
        """From the rank group `source` to the ranks at this place in all groups."""
        dist.broadcast(value, self.groups.peers[source], group=self.groups.whole.device_mesh.get_group(0))

    def _local_shape(self, program: Program, name: str) -> tuple[int, ...]:
        """Of this rank's block of a result of the whole batch, or of one micro-batch."""
        layout, mesh = output_layout(self.plan, name), self.groups.mesh
        return tuple(local_shape(_returned(program, name).shape, layout, mesh, mesh.coordinate(rank())))

    def _dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = _returned(self.whole, name).dtype
        return dtype


@dataclass(kw_only=True, eq=False)
class _Run:
    """One step: what its passes have left for each other."""

    step: PipelineStep
    bind: BindPart
    pieces: int
    totals: dict[str, torch.Tensor]
    wires: Wires
    whole_statistics: dict[str, torch.Tensor] = field(default_factory=dict)
    results: dict[str, dict[int, torch.Tensor]] = field(default_factory=lambda: defaultdict(dict))
    """Loss or output -> micro-batch -> its value, where this rank makes it."""
    here: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)
    """Values that go from one stage of this rank to another: (name, micro-batch, reading stage)."""
    saved: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    """(stage, micro-batch) -> what forward saved; then what W needs."""

    def actions(self, actions: Sequence[PipeAction]) -> None:
        """Run them in order; what the next one receives is on its way while one computes."""
        following: Iterator[PipeAction | None] = iter([*actions[1:], None])
        for action in actions:
            received = self._receive(action)
            later = next(following)
            for message in self._messages(later) if later is not None else ():
                self.wires.expect(message)
            self._act(action, received)

    def _act(self, action: PipeAction, received: dict[str, torch.Tensor]) -> None:
        graphs = self.step.graphs[action.stage]
        if action.kind == "F":
            self._forward(action, graphs, received)
        elif graphs.backward is None:
            return
        elif action.kind == "W":
            kept = self.saved.pop(action[::2])
            graphs.run_weights(kept, self.totals, action.micro_batch, self.pieces)
        else:
            self._backward(action, graphs, received)

    def _forward(self, action: PipeAction, graphs: StageGraphs, received: dict[str, torch.Tensor]) -> None:
        values = named(self.step.bound_inputs, self.bind(action.micro_batch))
        values |= self.whole_statistics | received
        results, sent, saved = graphs.run_forward(values, action.micro_batch, self.pieces)
        for name, value in zip(graphs.results, results, strict=True):
            self.results[name][action.micro_batch] = value
        self._send(action, dict(zip(graphs.sent_forward, sent, strict=True)))
        if self.totals:
            self.saved[action[::2]] = saved

    def _backward(self, action: PipeAction, graphs: StageGraphs, received: dict[str, torch.Tensor]) -> None:
        saved = self.saved.pop(action[::2])
        for value in graphs.lowered.inputs:
            if value.role == "tangent":
                saved.append(received[value.name] if value.name in received else self._tangent(value))
        received.clear()
        sent, kept = graphs.run_backward(
            saved, self.totals, action.micro_batch, self.pieces, weights=action.kind == "B"
        )
        self._send(action, dict(zip(graphs.sent_backward, sent, strict=True)))
        if action.kind == "I":
            self.saved[action[::2]] = kept

    def _tangent(self, value: Input) -> torch.Tensor:
        return torch.full(value.shape, self.step.micro.loss_scale, dtype=value.dtype, device=self.step.groups.device)

    # between stages

    def _messages(self, action: PipeAction) -> list[Message]:
        """What a pass needs of other ranks."""
        mine, part = self.step.groups.group, action.micro_batch
        sources = [(c.name, self.step.schedule.rank_of(c.source, part)) for c in self._crossings_into(action)]
        return [Message(name, part, action.stage, source, mine) for name, source in sources if source != mine]

    def _crossings_into(self, action: PipeAction) -> list[Any]:
        if action.kind == "W":
            return []
        return self.step.stages.crossings_into(action.stage, action.kind != "F")

    def _receive(self, action: PipeAction) -> dict[str, torch.Tensor]:
        received = {message.name: self.wires.receive(message) for message in self._messages(action)}
        for crossing in self._crossings_into(action):
            if crossing.name not in received:
                received[crossing.name] = self.here.pop((crossing.name, action.micro_batch, action.stage))
        return received

    def _send(self, action: PipeAction, made: dict[str, torch.Tensor]) -> None:
        mine, part = self.step.groups.group, action.micro_batch
        for crossing in self.step.stages.crossings_from(action.stage, action.kind != "F"):
            value, target = made[crossing.name], self.step.schedule.rank_of(crossing.target, part)
            if target == mine:
                self.here[crossing.name, part, crossing.target] = value
            else:
                self.wires.send(Message(crossing.name, part, crossing.target, mine, target), value)


def _returned(program: Program, name: str) -> Any:
    """The fake tensor of an output."""
    index = next(i for i, output in enumerate(program.outputs) if output.name == name)
    return program.returned[index].meta["val"]


def named(inputs: Sequence[Input], bound: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Local tensors by the name of their input."""
    return {value.name: local_tensor(tensor) for value, tensor in zip(inputs, bound, strict=True)}
