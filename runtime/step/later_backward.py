"""Later backward: a call in eval mode runs the forward graph alone, and may be asked for gradients all the same.

    module.eval(); loss = module(x)           # forward only: nothing is saved
    loss.backward()                           # the call again, with a backward pass, and that pass

As of plain models, whose mode says nothing about gradients (those of Hugging Face come in eval mode). From then on the
module's calls in eval mode keep what their backward needs, but for those under `torch.no_grad()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


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
