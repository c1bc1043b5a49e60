"""A step in parts as one differentiable function of the parameters: backward hands out gradients that are there.

The call runs forward and backward of every part, with the tangent of a loss times `loss_scale`: what the `GradScaler`
is going to multiply it by, so that small gradients do not vanish on the way. Gradients are linear in the tangent, so
`loss.backward()` multiplies the totals by the tangent that it brings, over that scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from autopar.runtime.step.accumulation import HeldGradients
from autopar.runtime.step.emit import as_gradient, parameter_shapes
from autopar.runtime.step.emitted_step import Step

BindPart = Callable[[int], list[torch.Tensor]]
"""Micro-batch -> what `Bind` gives for its leaves."""


class PartsStep(Step, Protocol):
    """A `Step` that runs in parts."""

    def run_with_gradients(
        self, bind: BindPart, axes: Sequence[int], loss_scale: float | None
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor | None]]:
        """(results, one complete gradient of the scaled loss per gradient of `lowered`). loss_scale: None, nothing
        scales it; else an overflow on one rank is one on all, so that all skip the same step."""


def run_differentiably(
    step: PartsStep,
    held: HeldGradients,
    bind: BindPart,
    axes: Sequence[int],
    parameters: Sequence[torch.Tensor],
    loss_scale: float | None,
) -> tuple[torch.Tensor, ...]:
    """The results of the step, of which the loss may be differentiated by the parameters.

    parameters: those of `step.lowered.inputs`, in order.
    """
    anchor = torch.zeros((), device=step.groups.device, requires_grad=True)  # for ranks without a parameter
    results: tuple[torch.Tensor, ...] = _PartsFunction.apply(  # type: ignore[no-untyped-call]
        step, held, bind, axes, loss_scale, anchor, *parameters
    )
    return results


class _PartsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        step: PartsStep,
        held: HeldGradients,
        bind: BindPart,
        axes: Sequence[int],
        loss_scale: float | None,
        anchor: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            results, ctx.gradients = step.run_with_gradients(bind, axes, loss_scale)
        ctx.step, ctx.held, ctx.loss_scale = step, held, loss_scale or 1.0
        ctx.mark_non_differentiable(
            *(v for v, output in zip(results, step.forward_outputs, strict=True) if output.role != "loss")
        )
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        step: PartsStep = ctx.step
        if ctx.gradients is None:
            raise RuntimeError("the gradients of micro-batches were handed out already; call the module again")
        gradients, ctx.gradients = ctx.gradients, None
        tangent = next(t for t, output in zip(tangents, step.forward_outputs, strict=True) if output.role == "loss")
        factor = tangent / ctx.loss_scale
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(factor.to(gradient.dtype))
        for position, late in ctx.held.release():
            gradients[position] = late if gradients[position] is None else gradients[position] + late
        names = [output.name for output in step.lowered.outputs if output.role == "gradient"]
        by_name = dict(zip(names, gradients, strict=True))
        shapes = parameter_shapes(step.program)
        return (
            None,
            None,
            None,
            None,
            None,
            None,
            *(
                as_gradient(shapes, step.own_plan, step.groups, value.name, by_name.get(value.name))
                for value in step.lowered.inputs
                if value.role == "parameter"
            ),
        )
