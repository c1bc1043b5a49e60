"""Whole step: one rank's forward and backward graph as one differentiable function of the whole batch.

    step = emit_whole(lowered, groups)
    outputs = step(leaves, bind, held, axes=(), local=False)      # `.backward()` runs the backward graph

Both graphs meet in one `torch.autograd.Function` whose saved tensors are exactly those that the partition returns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from autopar._compat import release_saved_tensors
from autopar.passes.lowering.chain import resumed
from autopar.passes.lowering.placed_experts import as_held
from autopar.passes.lowering.stage import LoweredStep
from autopar.program import Input, Program
from autopar.runtime.collectives.progress import HERE
from autopar.runtime.kernels import GraphCall, kernels
from autopar.runtime.parameters import StageParameters, full_tensor, local_tensor
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.accumulation import CutBackward, HeldGradients
from autopar.runtime.step.bound_graphs import bind_groups, group_symbols
from autopar.runtime.step.differentiation import (
    Gradients,
    differentiated_once,
    given_tangents,
    read_weights,
    refuse_changed,
    unreached,
    without_gradient,
)
from autopar.runtime.step.emitted_step import Bind, Step
from autopar.runtime.step.repeatable import repeatable


@dataclass(frozen=True, kw_only=True)
class WholeStep(Step):
    """The `Step` that runs the whole batch at once."""

    forward: GraphCall
    backward: GraphCall | None
    uncut: LoweredStep
    """What `cut` is made of."""
    read_by_backward: frozenset[str]
    """The inputs that backward reads as they are when it runs."""

    @cached_property
    def cut(self) -> CutBackward | None:
        """The backward graph without its last reductions, for `no_sync()`: made where that is first open."""
        stage, backend = resumed(self.uncut, self.plan).only, self.plan.kernel_backend
        if stage.late is None:
            return None
        return CutBackward(
            unreduced=kernels(bind_groups(stage.late.unreduced, self.groups), backend=backend),
            reduce=kernels(bind_groups(stage.late.reduce, self.groups), backend=backend),
            gradients=tuple(output.name for output in stage.program.outputs if output.role == "gradient"),
            positions=stage.late.positions,
        )

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
        """As `Step` says; nothing is cut and backward runs when it is asked for, so the rest says nothing here."""
        tensors = bind(leaves)
        if self.backward is None or not torch.is_grad_enabled():
            with torch.no_grad():
                returned = self.forward([local_tensor(tensor) for tensor in tensors])
            return tuple(returned[: len(self.forward_outputs)])
        results: tuple[torch.Tensor, ...] = _StepFunction.apply(self, held, *tensors)  # type: ignore[no-untyped-call]
        return results


class _StepFunction(torch.autograd.Function):
    """Forward graph and backward graph as one differentiable function."""

    @staticmethod
    def forward(ctx: Any, step: WholeStep, held: HeldGradients, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        returned = step.forward([local_tensor(tensor) for tensor in tensors])
        count = len(step.forward_outputs)
        results, saved = returned[:count], returned[count:]
        ctx.step = step
        ctx.held = held
        ctx.save_for_backward(*(value for value in saved if isinstance(value, torch.Tensor)))
        ctx.constants = [None if isinstance(value, torch.Tensor) else value for value in saved]
        inputs = {id(local_tensor(tensor)) for tensor in tensors}
        results = tuple(value.clone() if id(value) in inputs else value for value in results)
        ctx.weights = read_weights(step, tensors, step.read_by_backward)
        ctx.mark_non_differentiable(*without_gradient(step, results))
        ctx.set_materialize_grads(False)  # no zeros for outputs whose tangent nothing reads
        return results

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Gradients:
        step: WholeStep = ctx.step
        assert step.backward is not None
        taken = tangents_of(step.lowered)
        by_name = given_tangents(step, tangents, [value.name for value in taken])
        refuse_changed(ctx.weights)
        arguments = _saved(ctx)
        arguments += [_tangent(by_name[value.name], value, step.groups.device) for value in taken]
        held: HeldGradients = ctx.held
        with HERE.inside("backward"), repeatable(step.plan.deterministic):
            if (held.holding or held.cut is not None) and step.cut is not None:
                return (None, None, *_by_input(step, held.backward(step.cut, arguments), set()))
            return (None, None, *_by_input(step, step.backward(arguments), unreached(step, by_name)))


def _saved(ctx: Any) -> list[Any]:
    """What forward saved, and nothing else holds it any more: each value ends with its last reader in backward."""
    tensors = iter(ctx.saved_tensors)
    saved = [next(tensors) if constant is None else constant for constant in ctx.constants]
    release_saved_tensors(ctx)
    return saved


def _tangent(given: torch.Tensor | None, meaning: Input, device: torch.device) -> torch.Tensor:
    """The local block of a tangent, zeros where the caller differentiates other outputs only."""
    if given is None:
        return torch.zeros(meaning.shape, dtype=meaning.dtype, device=device)
    return full_tensor(given).contiguous()  # a DTensor where the loss was added to a sum over parameters


def tangents_of(program: Program) -> list[Input]:
    """The tangent inputs, in their order."""
    return [value for value in program.inputs if value.role == "tangent"]


def _by_input(
    step: WholeStep, gradients: Sequence[torch.Tensor | None], left_out: Collection[str]
) -> list[torch.Tensor | None]:
    """One gradient per non-tangent input, None where there is none; parameters get DTensors in their layout."""
    names = [output.name for output in step.lowered.outputs if output.role == "gradient"]
    by_name = {name: value for name, value in zip(names, gradients, strict=True) if name not in left_out}
    return [
        step.parameter_gradient(value.name, by_name.get(value.name))
        if value.role == "parameter"
        else by_name.get(value.name)
        if value.role == "input"
        else None
        for value in step.lowered.inputs
        if value.role != "tangent"
    ]


def emit_whole(lowered: LoweredStep, groups: ProcessGroups) -> WholeStep:
    """Bind the graphs of the whole batch to processes and kernels."""
    stage, backend = lowered.only, lowered.plan.kernel_backend
    parts = stage.partition.graphs
    groups.create(group_symbols(*parts))
    calls = [kernels(bind_groups(part, groups), backend=backend) for part in parts]
    return WholeStep(
        micro=lowered.micro,
        lowered=stage.program,
        plan=lowered.plan,
        own_plan=as_held(lowered.plan, lowered.program),
        groups=groups,
        stage_parameters=StageParameters(),
        forward=calls[0],
        backward=calls[1] if len(calls) > 1 else None,
        uncut=lowered,
        read_by_backward=frozenset(
            value.name
            for node, value in zip(stage.program.placeholders, stage.program.inputs, strict=True)
            if node.name in {saved.name for saved in stage.partition.saved if saved.is_input}
        ),
    )
