"""A step in parts as one differentiable function of the parameters: backward hands out gradients that are there.

The call runs forward and backward of every part, with the tangent of a loss times `loss_scale`: what the `GradScaler`
is going to multiply it by, so that small gradients do not vanish on the way. Gradients are linear in the tangent, so
`loss.backward()` multiplies the totals by the tangent that it brings, over that scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from autopar.errors import GradientError
from autopar.runtime.pipeline.overflow import agree_on_scaled, refuse_unscaled
from autopar.runtime.step.accumulation import HeldGradients
from autopar.runtime.step.differentiation import (
    Gradients,
    differentiated_once,
    given_tangents,
    unreached,
    without_gradient,
)
from autopar.runtime.step.emitted_step import Step

ResultsAndGradients: TypeAlias = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]
"""Results of a step, and the complete gradients of the scaled loss by the names of their parameters."""


def run_differentiably(
    step: Step,
    run: Callable[[], ResultsAndGradients],
    held: HeldGradients,
    parameters: Sequence[torch.Tensor],
    loss_scale: float | None,
) -> tuple[torch.Tensor, ...]:
    """The results of the step, of which the loss may be differentiated by the parameters.

    parameters: those of `step.bound_inputs`, in order. loss_scale: that of the gradients which `run` returns.
    """
    anchor = torch.zeros((), device=step.groups.device, requires_grad=True)  # for ranks without a parameter
    results: tuple[torch.Tensor, ...] = _PartsFunction.apply(  # type: ignore[no-untyped-call]
        step, run, held, loss_scale, anchor, *parameters
    )
    return results


class _PartsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        step: Step,
        run: Callable[[], ResultsAndGradients],
        held: HeldGradients,
        loss_scale: float | None,
        anchor: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            results, ctx.gradients = run()
        ctx.step, ctx.held, ctx.loss_scale = step, held, loss_scale
        ctx.mark_non_differentiable(*without_gradient(step, results))
        ctx.set_materialize_grads(False)  # a tangent that is there came from the caller
        return results

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Gradients:
        step: Step = ctx.step
        if ctx.gradients is None:
            raise GradientError("the gradients of micro-batches were handed out already; call the module again")
        losses = [output.name for output in step.forward_outputs if output.role == "loss"]
        by_name = given_tangents(step, tangents, losses)
        tangent = next(given for given in by_name.values() if given is not None)
        left_out = unreached(step, by_name)
        gradients = {name: gradient for name, gradient in ctx.gradients.items() if name not in left_out}
        ctx.gradients = None
        factor = tangent / (ctx.loss_scale or 1.0)
        if ctx.loss_scale is None:
            refuse_unscaled(step, factor)
        for gradient in gradients.values():
            gradient.mul_(factor.to(gradient.dtype))
        if ctx.loss_scale is None:
            agree_on_scaled(step, gradients, factor)
        for name, late in ctx.held.release():
            gradients[name] = gradients[name] + late if name in gradients else late
        parameters = [value.name for value in step.bound_inputs if value.role == "parameter"]
        return (None, None, None, None, None, *(step.parameter_gradient(n, gradients.get(n)) for n in parameters))
