"""The pipeline of a plan on one rank: the actions of its schedule, one after the other, between wires.

    loss = module(batch)       0F0, 0F1, 0B0, 0F2, ...: all micro-batches through the stages of this rank
    loss.backward()            hands out the gradients, times the incoming gradient of the loss

A rank holds the parameters of its own stages. Gradients are added up over micro-batches where they are made; those of a
parameter of several stages are added across their ranks at the end. Loss and outputs come back on every rank, broadcast
by the ranks of the stage that makes them. A stage that stands on two ranks takes every micro-batch on one of them, and
its parameters are shared like any that several ranks hold. Without gradients only the forward passes run.

A schedule that leaves backward passes to the next step (micro-batch -1) hands out the gradients of the batch before,
whole ones, at the weights that its forward saw: a step keeps a copy of them. The first step hands out zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import ConfigurationError
from autopar.parallel_plan import Plan
from autopar.passes.stages import StagePrograms
from autopar.program import Input, MicroProgram, Output, Program
from autopar.runtime.accumulation import HeldGradients
from autopar.runtime.batch_parts import BatchParts, scaled
from autopar.runtime.differentiable_parts import BindPart, run_differentiably
from autopar.runtime.emit import local_tensor
from autopar.runtime.kernels import GraphCall
from autopar.runtime.parameters import StageParameters
from autopar.runtime.pipeline_routes import Piece
from autopar.runtime.pipeline_wires import Form, Message, Wires, message_order
from autopar.runtime.process_groups import StageProcesses, rank
from autopar.runtime.shared_values import SharedGradients, StageResults
from autopar.runtime.stage_graphs import StageGraphs, Totals
from autopar.runtime.step import Bind
from autopar.schedules.actions import PipeAction, Schedule


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """The `Step` of a plan with stages. lowered: this rank's inputs and gradients, without a graph of its own; graphs:
    of its stages; statistics: their graph and its inputs; forms: of what this rank sends or receives; pieces: of a
    message; shared: what completes the gradients of parameters that other rank groups hold too."""

    micro: MicroProgram
    lowered: Program
    plan: Plan
    own_plan: Plan
    groups: StageProcesses
    stages: StagePrograms
    graphs: Mapping[int, StageGraphs]
    statistics: tuple[GraphCall, tuple[Input, ...]] | None
    schedule: Schedule
    forms: Mapping[str, Form]
    pieces: Callable[[Message], Sequence[Piece]]
    gradient_forms: Mapping[str, Form]
    shared: SharedGradients
    stage_parameters: StageParameters
    results: StageResults
    last_run: list[PipelineRun] = field(default_factory=list)
    """Of a schedule that leaves passes to the next step: the step before, if there was one."""

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
        return BatchParts(micro=self.micro, plan=self.own_plan, groups=self.groups)

    @property
    def forward_outputs(self) -> tuple[Output, ...]:
        """Loss and outputs of the whole: what a call returns."""
        return tuple(output for output in self.program.outputs if output.role in ("loss", "output"))

    def __call__(
        self,
        leaves: Sequence[Any],
        bind: Bind,
        held: HeldGradients,
        *,
        axes: Sequence[int],
        local: bool,
        loss_scale: float | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """As `Step` says. Raises ConfigurationError where local parts do not split."""
        part_of = self.parts.split(axes, local)

        def bound(part: int) -> list[torch.Tensor]:
            return bind(part_of(leaves, part))

        if not self.program.training or not torch.is_grad_enabled():
            return self._run(bound, axes, None, self.forward_only, 1.0)
        parameters = [
            tensor for tensor, value in zip(bound(0), self.bound_inputs, strict=True) if value.role == "parameter"
        ]
        return run_differentiably(self, held, bound, axes, parameters, loss_scale)

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

    @cached_property
    def is_delayed(self) -> bool:
        """Whether backward passes are left to the next step."""
        return any(action.micro_batch < 0 for action in self.schedule)

    def run_with_gradients(
        self, bind: BindPart, axes: Sequence[int], loss_scale: float | None
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor | None]]:
        """(results, one complete gradient of the scaled loss per gradient of `lowered`).

        Raises ConfigurationError for a loss scale where gradients are those of the step before, at another scale.
        """
        if self.is_delayed and loss_scale is not None:
            raise ConfigurationError("a schedule that leaves passes to the next step takes no scaler; pick another one")
        gradients: dict[str, torch.Tensor] = {}
        results = self._run(bind, axes, gradients, self.schedule, loss_scale or 1.0)
        device = self.groups.device
        for name, form in self.gradient_forms.items():
            if name not in gradients:
                gradients[name] = torch.zeros(form.shape, dtype=form.dtype, device=device)
        self.shared.complete(gradients)
        if loss_scale is not None:
            _overflow_together(gradients, device)
        return results, [gradients[output.name] for output in self.lowered.outputs]

    def _run(
        self,
        bind: BindPart,
        axes: Sequence[int],
        gradients: dict[str, torch.Tensor] | None,
        schedule: Schedule,
        loss_scale: float,
    ) -> tuple[torch.Tensor, ...]:
        before = self.last_run[0] if self.last_run and gradients is not None else None
        order = [m for m in self.orders[gradients is not None] if before is not None or m.micro_batch >= 0]
        wires = Wires(order, self.groups.group, rank(), self.pieces, self.forms, self.groups.device)
        run = PipelineRun(
            step=self,
            bind=bind,
            pieces=self.parts.pieces(axes),
            schedule=schedule,
            gradients=gradients,
            wires=wires,
            loss_scale=loss_scale,
            before=before,
        )
        run.whole_statistics = self._statistics(bind)
        run.actions(schedule.ranks[self.groups.group])
        if gradients is not None and self.is_delayed:
            run.leave_over(order)
            self.last_run[:] = [run]
        wires.finish()
        return tuple(
            self.results.everywhere(output, run.results.get(output.name, {}), self.parts, axes)
            for output in self.forward_outputs
        )

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


@dataclass(kw_only=True, eq=False)
class PipelineRun:
    """One step: what its passes have left for each other. gradients: of this rank, once complete; None: not wanted."""

    step: PipelineStep
    bind: BindPart
    pieces: int
    schedule: Schedule
    gradients: dict[str, torch.Tensor] | None
    wires: Wires
    loss_scale: float
    before: PipelineRun | None
    """The step that left passes to this one."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """A copy of the parameters, where backward passes are left to a step that has others."""
    arrived: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)
    """As `here`, from other ranks, for passes that are left to the next step."""
    whole_statistics: dict[str, torch.Tensor] = field(default_factory=dict)
    results: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    """Output -> micro-batch -> its value."""
    prepared: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    totals: dict[int, Totals] = field(default_factory=dict)
    here: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)
    """Values that go from one stage of this rank to another: (name, micro-batch, reading stage)."""
    saved: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    """(stage, micro-batch) -> what forward saved; then what W needs."""

    def actions(self, actions: Sequence[PipeAction]) -> None:
        """Run them in order; what the next one receives is on its way while one computes."""
        values = named(self.step.bound_inputs, self.bind(0))
        delayed = self.gradients is not None and self.step.is_delayed
        if delayed:
            parameters = [value.name for value in self.step.bound_inputs if value.role == "parameter"]
            self.weights = {name: values[name].detach().clone() for name in parameters}
            values |= self.weights
        for stage, graphs in self.step.graphs.items():
            self.prepared[stage] = graphs.run_prepare(values)
            if self.gradients is not None:
                self.totals[stage] = graphs.zero_totals(self.step.groups.device)
        del values
        actions = [action for action in actions if action.micro_batch >= 0 or self.before is not None]
        last = {} if delayed else {a.stage: index for index, a in enumerate(actions) if a.kind != "F"}
        following: Iterator[PipeAction | None] = iter([*actions[1:], None])
        for index, action in enumerate(actions):
            received = self._receive(action)
            later = next(following)
            for message in self._messages(later) if later is not None else ():
                self.wires.expect(message)
            self.act(action, received)
            if last.get(action.stage) == index:
                self._complete(action.stage)

    def leave_over(self, order: Sequence[Message]) -> None:
        """Take in what the next step's passes read, and complete the gradients of the step before."""
        for message in order:
            key = (message.name, message.micro_batch, message.reader)
            if message.target == self.step.groups.group and self.wires.is_unread(message):
                self.arrived[key] = self.wires.receive(message)
        if self.before is not None:
            assert self.gradients is not None
            for stage in self.before.totals:
                self._add(self.step.graphs[stage].run_reduce(self.before.totals[stage]))
        self.before = None

    def act(self, action: PipeAction, received: dict[str, torch.Tensor]) -> None:
        """One pass, and the start of what it sends. received: what it reads of other stages, emptied."""
        graphs = self.step.graphs[action.stage]
        if action.kind == "F":
            self._forward(action, graphs, received)
        elif graphs.backward is None:
            return
        elif action.kind == "W":
            kept = self.saved.pop(action[::2])
            graphs.run_weights(kept, self.totals[action.stage], action.micro_batch, self.pieces)
        else:
            self._backward(action, graphs, received)

    def _of(self, micro_batch: int) -> tuple[PipelineRun, int]:
        """The step to which a micro-batch belongs, and its number there."""
        if micro_batch >= 0:
            return self, micro_batch
        assert self.before is not None
        return self.before, micro_batch + self.step.micro.count

    def _forward(self, action: PipeAction, graphs: StageGraphs, received: dict[str, torch.Tensor]) -> None:
        values = named(self.step.bound_inputs, self.bind(action.micro_batch))
        values |= self.weights | self.whole_statistics | received
        prepared = self.prepared[action.stage]
        results, sent, saved = graphs.run_forward(values, prepared, action.micro_batch, self.pieces)
        for name, value in zip(graphs.results, results, strict=True):
            self.results.setdefault(name, {})[action.micro_batch] = value
        self._send(action, dict(zip(graphs.sent_forward, sent, strict=True)))
        if self.gradients is not None:
            self.saved[action[::2]] = saved

    def _backward(self, action: PipeAction, graphs: StageGraphs, received: dict[str, torch.Tensor]) -> None:
        run, part = self._of(action.micro_batch)
        saved = run.saved.pop((action.stage, part))
        for value in graphs.lowered.inputs:
            if value.role == "tangent":
                saved.append(received[value.name] if value.name in received else self._tangent(value))
        received.clear()
        sent, kept = graphs.run_backward(
            saved,
            run.prepared[action.stage],
            run.totals[action.stage],
            part,
            self.pieces,
            weights=action.kind == "B",
        )
        self._send(action, dict(zip(graphs.sent_backward, sent, strict=True)))
        if action.kind == "I":
            self.saved[action[::2]] = kept

    def _complete(self, stage: int) -> None:
        """Behind the last backward of a stage its gradients are summed over the ranks."""
        self._add(self.step.graphs[stage].run_reduce(self.totals.pop(stage)))
        del self.prepared[stage]

    def _add(self, found: Mapping[str, torch.Tensor]) -> None:
        assert self.gradients is not None
        for name, gradient in found.items():
            self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient

    def _tangent(self, value: Input) -> torch.Tensor:
        scale = self.step.micro.loss_scale * self.loss_scale
        return torch.full(value.shape, scale, dtype=value.dtype, device=self.step.groups.device)

    # between stages

    def _messages(self, action: PipeAction) -> list[Message]:
        """What a pass needs of other ranks."""
        mine, found = self.step.groups.group, []
        for crossing in self._crossings_into(action):
            source = self.schedule.rank_of(crossing.source, action.micro_batch)
            if source != mine and self._left_over(crossing.name, action) is None:
                found.append(Message(crossing.name, action.micro_batch, action.stage, source, mine))
        return found

    def _crossings_into(self, action: PipeAction) -> list[Any]:
        if action.kind == "W":
            return []
        return self.step.stages.crossings_into(action.stage, action.kind != "F")

    def _receive(self, action: PipeAction) -> dict[str, torch.Tensor]:
        received = {message.name: self.wires.receive(message) for message in self._messages(action)}
        for crossing in self._crossings_into(action):
            if crossing.name not in received:
                left = self._left_over(crossing.name, action)
                received[crossing.name] = (
                    self.here.pop((crossing.name, action.micro_batch, action.stage)) if left is None else left
                )
        return received

    def _left_over(self, name: str, action: PipeAction) -> torch.Tensor | None:
        """What arrived in the step before for a pass that it left to this one."""
        if action.micro_batch >= 0 or self.before is None:
            return None
        _, part = self._of(action.micro_batch)
        return self.before.arrived.get((name, part, action.stage), self.before.here.get((name, part, action.stage)))

    def _send(self, action: PipeAction, made: dict[str, torch.Tensor]) -> None:
        mine = self.step.groups.group
        for crossing in self.step.stages.crossings_from(action.stage, action.kind != "F"):
            value, reader = made[crossing.name], self.schedule.rank_of(crossing.target, action.micro_batch)
            if reader == mine:
                self.here[crossing.name, action.micro_batch, crossing.target] = value
            else:
                self.wires.send(Message(crossing.name, action.micro_batch, crossing.target, mine, reader), value)


def _overflow_together(gradients: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Make the gradients of every rank infinite where those of one are: a GradScaler sees those of its rank only."""
    finite = torch.ones((), device=device)
    for gradient in gradients.values():
        finite = finite * gradient.isfinite().all()
    dist.all_reduce(finite, dist.ReduceOp.MIN)
    if not bool(finite):
        for gradient in gradients.values():
            gradient.fill_(float("inf"))


def named(inputs: Sequence[Input], bound: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Local tensors by the name of their input."""
    return {value.name: local_tensor(tensor) for value, tensor in zip(inputs, bound, strict=True)}
