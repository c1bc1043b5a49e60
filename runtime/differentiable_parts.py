"""A step in parts as one differentiable function of the parameters: backward hands out gradients that are there.

The call runs forward and backward of every part, with the tangent of a loss that nothing scales. Gradients are linear
in the tangent, so `loss.backward()` multiplies the totals by the tangent that it brings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from autopar.runtime.accumulation import HeldGradients
from autopar.runtime.emit import as_gradient
from autopar.runtime.step import Step

BindPart = Callable[[int], list[torch.Tensor]]
"""Micro-batch -> what `Bind` gives for its leaves."""


class PartsStep(Step, Protocol):
    """A `Step` that runs in parts."""

    def run_with_gradients(
        self, bind: BindPart, axes: Sequence[int]
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor | None]]:
        """(results, one complete gradient of the loss per gradient of `lowered`)."""


def run_differentiably(
    step: PartsStep, held: HeldGradients, bind: BindPart, axes: Sequence[int], parameters: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The results of the step, of which the loss may be differentiated by the parameters.

    parameters: those of `step.lowered.inputs`, in order.
    """
    anchor = torch.zeros((), device=step.groups.device, requires_grad=True)  # for ranks without a parameter
    results: tuple[torch.Tensor, ...] = _PartsFunction.apply(step, held, bind, axes, anchor, *parameters)  # type: ignore[no-untyped-call]
    return results


class _PartsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        step: PartsStep,
        held: HeldGradients,
        bind: BindPart,
        axes: Sequence[int],
        anchor: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            results, ctx.gradients = step.run_with_gradients(bind, axes)
        ctx.step, ctx.held = step, held
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
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(tangent.to(gradient.dtype))
        for position, late in ctx.held.release():
            gradients[position] = late if gradients[position] is None else gradients[position] + late
        names = [output.name for output in step.lowered.outputs if output.role == "gradient"]
        by_name = dict(zip(names, gradients, strict=True))
        return (
            None,
            None,
            None,
            None,
            None,
            *(
                as_gradient(step.program, step.plan, step.groups, value.name, by_name.get(value.name))
                for value in step.lowered.inputs
                if value.role == "parameter"
            ),
        )
