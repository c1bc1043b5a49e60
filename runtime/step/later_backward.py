"""Later backward: a call in eval mode runs the forward graph alone, and may be asked for gradients all the same.

    module.eval(); loss = module(x)           # forward only: nothing is saved
    loss.backward()                           # the call again, with a backward pass, and that pass

As of plain models, whose mode says nothing about gradients (those of Hugging Face come in eval mode). From then on the
module's calls in eval mode keep what their backward needs, but for those under `torch.no_grad()`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from autopar.errors import GradientError
from autopar.runtime.step.differentiation import refuse_changed
from autopar.runtime.step.emitted_step import Step

log = logging.getLogger(__name__)


def may_be_trained(step: Step, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a call that runs forward alone would have gradients in the plain model. parameters: of all ranks."""
    if step.program.training or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    return any(parameter.requires_grad for parameter in parameters)


class RepeatedCall:
    """A call as it is made now, once more. parameters: what must not change until then; state: asks for what else must
    not; run: makes it, under a graph with a backward pass."""

    has_warned = False
    """Once per process."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        state: Callable[[], Hashable],
        run: Callable[[], tuple[torch.Tensor, ...]],
    ) -> None:
        self._weights = [(name, parameter, parameter._version) for name, parameter in parameters]
        self._then, self._state, self._run = state(), state, run

    def __call__(self) -> tuple[torch.Tensor, ...]:
        """Its results, which have gradients. Raises GradientError where they would not be those of the call."""
        refuse_changed(self._weights)
        if self._state() != self._then:
            raise GradientError(
                "this call was made in eval mode, and its backward pass runs it again; modes, frozen parameters, "
                "autocast or Python state have changed since: call backward before they do, or module.train() before "
                "the call"
            )
        if not RepeatedCall.has_warned:
            RepeatedCall.has_warned = True
            log.warning(
                "the model is trained in eval mode: without dropout and running statistics, and under a plan that was "
                "made for forward alone; where that is not meant, call model.train() before autopar.compile"
            )
        with torch.enable_grad():
            return self._run()


def with_later_backward(
    results: Sequence[torch.Tensor], again: Callable[[], Sequence[torch.Tensor]]
) -> tuple[torch.Tensor, ...]:
    """`results` of a call without a backward pass, such that one runs `again`, which returns them with theirs."""
    anchor = torch.zeros((), requires_grad=True)
    found: tuple[torch.Tensor, ...] = _LaterBackward.apply(anchor, again, *results)  # type: ignore[no-untyped-call]
    return found


class _LaterBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, again: Callable[[], Sequence[torch.Tensor]], *results: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.again = again
        ctx.set_materialize_grads(False)
        shared = tuple(result.detach() for result in results)
        ctx.mark_non_differentiable(*(each for each in shared if not each.is_floating_point()))
        return shared

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        results = ctx.again()
        reached = [(r, t) for r, t in zip(results, tangents, strict=True) if t is not None and r.requires_grad]
        torch.autograd.backward([result for result, _ in reached], [tangent for _, tangent in reached])
        return (None, None, *(None for _ in tangents))
