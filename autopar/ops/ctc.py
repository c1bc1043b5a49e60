"""The CTC loss as one operator with torch's own kernels inside; only the batch may be split.

torch's operator saves a table whose width depends on the longest target, which no graph can hold, and takes lengths as
numbers. Capture replaces `torch.nn.functional.ctc_loss` by `autopar::ctc_loss`, whose shapes are fixed. Backward fills
the table again, which keeps the memory of a step to the operands.

    losses (N,) = ctc_loss(log_probs (T, N, C), targets (N, S), input_lengths (N,), target_lengths (N,), 0, False)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


@torch.library.custom_op("autopar::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Loss (N,) of every sample: log_probs (T, N, C), targets (N, S) of classes, lengths (N,) of integers.

    zero_infinity: a target that is too long for its input gives 0 in place of infinity.
    """
    if not log_probs.shape[1]:  # torch's kernels refuse an empty batch, which an uneven split may leave
        return log_probs.new_empty(0)
    losses, _ = _filled(log_probs, targets, input_lengths, target_lengths, blank)
    return losses.masked_fill(losses == float("inf"), 0.0) if zero_infinity else losses


@torch.library.custom_op("autopar::ctc_loss_backward", mutates_args=())
def ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Gradient (T, N, C) of log_probs from that of the losses (N,). As torch's, it is right for log_probs that come out
    of a log_softmax."""
    if not log_probs.shape[1]:
        return torch.empty_like(log_probs)
    losses, table = _filled(log_probs, targets, input_lengths, target_lengths, blank)
    lengths = input_lengths, target_lengths
    found: Tensor = _aten._ctc_loss_backward.Tensor(
        grad.contiguous(), log_probs, targets, *lengths, losses, table, blank, zero_infinity
    )
    return found


def _filled(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int
) -> tuple[Tensor, Tensor]:
    """(losses (N,), the table of the recursion) of torch's kernel."""
    losses, table = _aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank)
    return losses, table


def buffers_of_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """What `ctc_loss` makes where a target is as long as `targets` is wide, without its numbers: for counting bytes."""
    table = _table(log_probs, targets)
    return table.new_empty(log_probs.shape[1])


def buffers_of_backward(
    grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *_: Any
) -> Tensor:
    """As `buffers_of_loss`, of `ctc_loss_backward`: the table, and that of the recursion from the end."""
    tables = [_table(log_probs, targets) for _ in range(2)]
    return tables[0].new_empty(log_probs.shape)


def _table(log_probs: Tensor, targets: Tensor) -> Tensor:
    """A number for every sample, step, and class or blank of the longest target."""
    return log_probs.new_empty(log_probs.shape[1], log_probs.shape[0], 2 * targets.shape[-1] + 1)


@ctc_loss.register_fake
def _(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@ctc_loss_backward.register_fake
def _(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return ctc_loss_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


ctc_loss.register_autograd(_backward, setup_context=_save)
