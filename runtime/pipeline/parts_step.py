"""A step in parts on one rank: the passes of its schedule, one after the other, between wires.

    loss = module(batch)       0F0, 0F1, 0B0, 0F2, ...: all micro-batches through the stages of this rank
    loss.backward()            hands out the gradients, times the incoming gradient of the loss

A rank holds the parameters of its own stages; where a plan has one stage, that is all of them, and every micro-batch
goes forward and backward before the next. Gradients are added up over micro-batches where they are made; those of a
parameter of several stages are added across their ranks at the end. Loss and outputs come back on every rank, broadcast
by the ranks of the stage that makes them. A stage that stands on two ranks takes every micro-batch on one of them, and
its parameters are shared like any that several ranks hold. Without gradients only the forward passes run.

A schedule that leaves backward passes to the next step (micro-batch -1) hands out the gradients of the batch before,
whole ones, at the weights that its forward saw: a step keeps a copy of them. The first step hands out zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from autopar.errors import ConfigurationError
from autopar.ops.folded_sums import folded_sum
from autopar.program import Input
from autopar.runtime.pipeline.differentiable_parts import ResultsAndGradients, run_differentiably
from autopar.runtime.pipeline.overflow import overflow_together
from autopar.runtime.pipeline.pipeline_routes import SentPiece
from autopar.runtime.pipeline.pipeline_run import BindPart, PipelineRun, ScheduledStep, named
from autopar.runtime.pipeline.pipeline_wires import Form, Message, Wires, message_order
from autopar.runtime.pipeline.shared_values import SharedGradients, StageResults
from autopar.runtime.pipeline.stage_passes import PartCalls
from autopar.runtime.process_groups import rank
from autopar.runtime.step.accumulation import HeldGradients
from autopar.runtime.step.batch_parts import BatchParts, scaled
from autopar.runtime.step.emitted_step import Bind
from autopar.schedules.actions import Schedule


@dataclass(frozen=True, kw_only=True)
class PartsStep(ScheduledStep):
    """The `Step` of a plan with micro-batches or stages. statistics: their graph and its inputs; forms: of what this
    rank sends or receives; pieces: of a message; shared: what completes the gradients of parameters that other rank
    groups hold too; results: what hands loss and outputs to every rank."""

    statistics: tuple[fx.GraphModule, tuple[Input, ...]] | None
    calls: PartCalls
    forms: Mapping[str, Form]
    pieces: Callable[[Message], Sequence[SentPiece]]
    gradient_forms: Mapping[str, Form]
    shared: SharedGradients
    results: StageResults
    last_run: list[PipelineRun] = field(default_factory=list)
    """Of a schedule that leaves passes to the next step: the step before, if there was one."""
    rehearsed: list[frozenset[str]] = field(default_factory=list)
    """Sets of kinds of passes whose graphs are compiled."""

    @property
    def parts(self) -> BatchParts:
        """How the batch is cut, and outputs joined."""
        return BatchParts(micro=self.micro, plan=self.own_plan, groups=self.groups)

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
            with torch.no_grad():
                return self._run(bound, axes, None, self.schedule.forward_only, 1.0)
        parameters = [
            tensor for tensor, value in zip(bound(0), self.bound_inputs, strict=True) if value.role == "parameter"
        ]
        run = partial(self.results_and_gradients, bound, axes, loss_scale)
        return run_differentiably(self, run, held, parameters, loss_scale)

    @cached_property
    def orders(self) -> dict[bool, list[Message]]:
        """Whether gradients are wanted -> the order of all messages."""
        sends = {
            (stage, backward): [(c.name, c.target) for c in self.stages.crossings_from(stage, backward)]
            for stage in range(self.schedule.num_stages)
            for backward in (False, True)
        }
        return {True: message_order(self.schedule, sends), False: message_order(self.schedule.forward_only, sends)}

    def results_and_gradients(
        self, bind: BindPart, axes: Sequence[int], loss_scale: float | None
    ) -> ResultsAndGradients:
        """loss_scale: None, nothing scales the loss; else an overflow in one stage is one in all, so that all skip the
        same step. Raises ConfigurationError for one where gradients are those of the step before, at another scale."""
        if self.is_delayed and loss_scale is not None:
            raise ConfigurationError("a schedule that leaves passes to the next step takes no scaler; pick another one")
        gradients: dict[str, torch.Tensor] = {}
        results = self._run(bind, axes, gradients, self.schedule, loss_scale or 1.0)
        device = self.groups.device
        for name, form in self.gradient_forms.items():
            if name not in gradients:
                gradients[name] = torch.zeros(form.shape, dtype=form.dtype, device=device)
        self.shared.complete(gradients)
        if loss_scale is not None and len(self.groups.meshes) > 1:
            overflow_together(gradients, device)
        return results, gradients

    def _run(
        self,
        bind: BindPart,
        axes: Sequence[int],
        gradients: dict[str, torch.Tensor] | None,
        schedule: Schedule,
        loss_scale: float,
    ) -> tuple[torch.Tensor, ...]:
        self._rehearse(bind, schedule, axes)
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
        run.whole_statistics = self._statistics(bind, run.pieces)
        run.actions(schedule.ranks[self.groups.group])
        if gradients is not None and self.is_delayed:
            run.leave_over(order)
            self.last_run[:] = [run]
        wires.finish()
        return tuple(
            self.results.everywhere(output, run.results.get(output.name, {}), self.parts, axes)
            for output in self.forward_outputs
        )

    def _rehearse(self, bind: BindPart, schedule: Schedule, axes: Sequence[int]) -> None:
        """Compile all graphs of this rank before the first step of a kind, where they are compiled."""
        kinds = frozenset(action.kind for action in schedule)
        if self.plan.kernel_backend != "inductor" or kinds in self.rehearsed:
            return
        self.rehearsed.append(kinds)
        values = named(self.bound_inputs, bind(0)) | self._statistics(bind, self.parts.pieces(axes))
        for graphs in self.graphs.values():
            graphs.rehearse(values, kinds, self.parts.pieces(axes), self.groups.device)

    def _statistics(self, bind: BindPart, pieces: int) -> dict[str, torch.Tensor]:
        """The statistics of the whole batch, by name."""
        if self.statistics is None:
            return {}
        graph, inputs = self.statistics
        blank = {
            value.name: torch.zeros(value.shape, dtype=value.dtype, device=self.groups.device)
            for value in inputs
            if value.role == "statistic"
        }
        parts: list[list[torch.Tensor]] = []
        for part in range(self.micro.count):
            values = named(self.bound_inputs, bind(part)) | blank
            parts.append(list(self.calls.of(graph, part, pieces)([values[value.name] for value in inputs])))
        sums = [folded_sum(torch.stack(found)) for found in zip(*parts, strict=True)]
        names = [output.name for output in self.program.outputs if output.role == "statistic"]
        return {n: scaled(value, self.micro.statistic_scales[n]) for n, value in zip(names, sums, strict=True)}
