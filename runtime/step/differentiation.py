"""Differentiation: what of a step a gradient may reach, what must not change before it does, and how often.

    weights = read_weights(step, tensors)                 # behind the forward graph
    refuse_changed(weights)                               # in front of the backward graph
    tangents = given_tangents(step, tangents)             # by output; none came to an output that takes none

    @differentiated_once                                  # create_graph=True, and that differentiated: an error
    def backward(ctx, *tangents): ...

The backward graph of a step is fixed when the model is captured. Where autograd would go on with another gradient than
that of what ran, or with none, these raise GradientError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from autopar.errors import GradientError
from autopar.runtime.step.emitted_step import Step

Gradients: TypeAlias = tuple[torch.Tensor | None, ...]


def differentiated_once(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """A `backward` whose gradients must not be differentiated: its graph is no function of what it was made from, and
    autograd would take them for constants."""

    @functools.wraps(backward)
    def run(ctx: Any, *tangents: Any) -> Gradients:
        with torch.no_grad():
            gradients = backward(ctx, *tangents)
        if not torch.is_grad_enabled():
            return gradients
        anchor = torch.zeros((), requires_grad=True)
        return tuple(
            _Differentiated.apply(anchor, gradient) if isinstance(gradient, torch.Tensor) else None  # type: ignore[no-untyped-call]
            for gradient in gradients
        )

    return run


class _Differentiated(torch.autograd.Function):
    """A gradient as it is, that says why it has none itself."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise GradientError(
            "a gradient of a compiled model cannot be differentiated again (create_graph=True, as for a gradient "
            "penalty): its backward pass is a fixed graph. Take the inner derivative in the model's forward, by "
            "torch.autograd.grad(..., create_graph=True), and return what you make of it in the loss"
        )


def without_gradient(step: Step, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `results` that autograd leaves out: changed buffers, and what the model returns without a gradient."""
    return [
        value
        for value, output in zip(results, step.forward_outputs, strict=True)
        if output.role == "mutation" or not output.requires_grad
    ]


def given_tangents(
    step: Step, tangents: Sequence[torch.Tensor | None], taken: Collection[str]
) -> dict[str, torch.Tensor | None]:
    """The tangent of every output, by name. taken: outputs whose tangents backward takes.

    Raises GradientError where one came to another output.
    """
    outputs = [(o.name, t) for o, t in zip(step.forward_outputs, tangents, strict=True) if o.role != "mutation"]
    refused = [name for name, tangent in outputs if tangent is not None and name not in taken]
    if refused:
        raise GradientError(_refusal(step, refused, taken))
    return dict(outputs)


def unreached(step: Step, tangents: Mapping[str, torch.Tensor | None]) -> set[str]:
    """The parameters and inputs that none of the given `tangents` reaches: torch leaves their gradient as it is, and an
    optimizer must not take zeros for one (weight decay, momentum)."""
    given = {name for name, tangent in tangents.items() if tangent is not None}
    return {name for name, behind in step.tangents_behind.items() if behind and behind.isdisjoint(given)}


def _refusal(step: Step, refused: Sequence[str], taken: Collection[str]) -> str:
    came = f"a gradient reached the output {', '.join(refused)}, but backward begins at {', '.join(taken)} alone"
    if step.plan.in_one_part:
        return f"{came}: pass differentiable={list(refused)} to autopar.compile, or make the sum in the model's forward"
    return (
        f"{came}, since micro-batches and stages run it inside of the call: return the sum of what is differentiated "
        f"as the loss, or plan without them (micro_batches=1) and with differentiable={list(refused)}"
    )


ReadWeights: TypeAlias = list[tuple[str, torch.Tensor, int]]
"""Names and tensors of parameters that backward reads, and the version of each in forward."""


def read_weights(step: Step, tensors: Sequence[torch.Tensor], read: Collection[str]) -> ReadWeights:
    """The parameters among the values of `step.bound_inputs` that are in `read`, as they are now."""
    return [
        (value.name, tensor, tensor._version)
        for value, tensor in zip(step.bound_inputs, tensors, strict=True)
        if value.name in read and value.role == "parameter"
    ]


def refuse_changed(weights: Sequence[tuple[str, torch.Tensor, int]]) -> None:
    """Raises GradientError where one was changed in place. Autograd itself watches the blocks that a step saves, and
    these do not count what happens to their DTensor."""
    changed = [name for name, tensor, version in weights if tensor._version != version]
    if changed:
        shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise GradientError(
            f"{shown} changed between forward and backward, which needs the weights that forward saw: call backward "
            "first, then optimizer.step() (or what else writes weights), or call the model again"
        )
