"""One step of a pipeline on one rank: its actions, one after the other, and what they leave for each other.

0F0    takes values and what arrived, keeps what backward needs, sends what other stages read
0B0    takes that and what arrived, adds gradients of parameters to totals, sends gradients
0B-1   the same for a micro-batch of the step before, which left its backward to this one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch

from autopar.passes.stages.cut_stages import StagePrograms
from autopar.program import Input
from autopar.runtime.parameters import local_tensor
from autopar.runtime.pipeline.gradient_fold import GradientFold
from autopar.runtime.pipeline.pipeline_wires import Message, Wires
from autopar.runtime.pipeline.stage_passes import StageGraphs, Totals
from autopar.runtime.step.emitted_step import Step
from autopar.schedules.actions import PipeAction, Schedule

BindPart: TypeAlias = Callable[[int], list[torch.Tensor]]
"""Micro-batch -> what `Bind` gives for its leaves."""


@dataclass(frozen=True, kw_only=True)
class ScheduledStep(Step):
    """A `Step` whose parts pass the stages of this rank in the order of a schedule. graphs: of its stages."""

    stages: StagePrograms
    graphs: Mapping[int, StageGraphs]
    schedule: Schedule

    @cached_property
    def loss(self) -> str:
        """The name of the output at which backward begins."""
        return next(output.name for output in self.program.outputs if output.role == "loss")

    @cached_property
    def is_delayed(self) -> bool:
        """Whether backward passes are left to the next step."""
        return any(action.micro_batch < 0 for action in self.schedule)


@dataclass(kw_only=True, eq=False)
class PipelineRun:
    """One step: what its passes have left for each other. gradients: of this rank, once complete; None: not wanted."""

    step: ScheduledStep
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
    folds: dict[int, GradientFold] = field(default_factory=dict)
    """In place of totals, where the batch is cut into logical shards."""
    here: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)
    """Values that go from one stage of this rank to another: (name, micro-batch, reading stage)."""
    saved: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    """(stage, micro-batch) -> what forward saved; then what W needs."""
    ends: dict[int, PipeAction] = field(default_factory=dict)
    """Stage -> the last pass of its backward."""
    started: dict[int, list[Any]] = field(default_factory=dict)
    """Stage -> its gradients, whose sums over ranks are on their way."""

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
                if self.step.plan.shards:
                    self.folds[stage] = GradientFold()
        del values
        actions = [action for action in actions if action.micro_batch >= 0 or self.before is not None]
        self.ends = {} if delayed else {action.stage: action for action in actions if action.kind != "F"}
        following: Iterator[PipeAction | None] = iter([*actions[1:], None])
        for action in actions:
            received = self._receive(action)
            later = next(following)
            for message in self._messages(later) if later is not None else ():
                self.wires.expect(message)
            self.act(action, received)
            if self.ends.get(action.stage) == action:
                self._complete(action.stage)
        while self.started:
            stage = next(iter(self.started))
            self._add(self.step.graphs[stage].run_ending(self.started.pop(stage)))

    def leave_over(self, order: Sequence[Message]) -> None:
        """Take in what the next step's passes read, and complete the gradients of the step before."""
        for message in order:
            key = (message.name, message.micro_batch, message.reader)
            if message.target == self.step.groups.group and self.wires.is_unread(message):
                self.arrived[key] = self.wires.receive(message)
        if self.before is not None:
            assert self.gradients is not None
            for stage in self.before.totals:
                complete, started = self.step.graphs[stage].run_reduce(self.before.totals[stage])
                self._add(complete)
                self._add(self.step.graphs[stage].run_ending(started) if started else {})
        self.before = None

    def act(self, action: PipeAction, received: dict[str, torch.Tensor]) -> None:
        """One pass, and the start of what it sends. received: what it reads of other stages, emptied."""
        graphs = self.step.graphs[action.stage]
        if action.kind == "F":
            self._forward(action, graphs, received)
        elif graphs.backward is None:
            return
        elif action.kind == "W":
            kept, totals = self.saved.pop(action[::2]), self.totals[action.stage]
            if self._sums(action, graphs):
                self.started[action.stage] = graphs.run_last(kept, [], totals, action.micro_batch, self.pieces)
            else:
                graphs.run_weights(kept, totals, action.micro_batch, self.pieces)
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
        prepared, totals = run.prepared[action.stage], run.totals[action.stage]
        if self._sums(action, graphs):
            self.started[action.stage] = graphs.run_last(saved, prepared, totals, part, self.pieces)
            return
        sent, kept = graphs.run_backward(saved, prepared, totals, part, self.pieces, weights=action.kind == "B")
        if action.stage in self.folds:
            self.folds[action.stage].add(kept)
        self._send(action, dict(zip(graphs.sent_backward, sent, strict=True)))
        if action.kind == "I":
            self.saved[action[::2]] = kept

    def _sums(self, action: PipeAction, graphs: StageGraphs) -> bool:
        """Whether a pass sums the gradients of its stage over the ranks, being the last of its backward."""
        return graphs.last is not None and self.ends.get(action.stage) == action

    def _complete(self, stage: int) -> None:
        """Behind the last backward of a stage its gradients are summed over the ranks, where that has not begun; the
        sums are awaited when all passes are done."""
        totals = self.totals.pop(stage)
        if stage in self.folds:
            totals = self.folds.pop(stage).total()
        complete, started = self.step.graphs[stage].run_reduce(totals)
        self._add(complete)
        if started:
            self.started[stage] = started
        del self.prepared[stage]

    def _add(self, found: Mapping[str, torch.Tensor]) -> None:
        assert self.gradients is not None
        for name, gradient in found.items():
            self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient

    def _tangent(self, value: Input) -> torch.Tensor:
        """Of the loss; zeros for further losses, since how much each counts is known behind the call only."""
        scale = self.step.micro.loss_scale * self.loss_scale if value.name == self.step.loss else 0.0
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


def named(inputs: Sequence[Input], bound: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Local tensors by the name of their input."""
    return {value.name: local_tensor(tensor) for value, tensor in zip(inputs, bound, strict=True)}
