"""Overflow: what a `GradScaler` skips, all ranks of a pipeline skip, though each sees the gradients of its stages only.

    compile(scaler=scaler)             backward inside of the call ran at the scale; one all-reduce shares overflows
    not told, and the loss is scaled   fp32, bf16: the same, behind the scaling; fp16: a GradientError, as small
                                       gradients vanished in a backward pass that ran unscaled
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from autopar.errors import GradientError
from autopar.runtime.step.emitted_step import Step


def overflow_together(gradients: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Make the gradients of every rank infinite where those of one are."""
    finite = torch.ones((), device=device)
    for gradient in gradients.values():
        finite = finite * gradient.isfinite().all()
    dist.all_reduce(finite, dist.ReduceOp.MIN)
    if not bool(finite):
        for gradient in gradients.values():
            gradient.fill_(float("inf"))


def refuse_unscaled(step: Step, factor: torch.Tensor) -> None:
    """factor: by which the loss was scaled behind a backward pass that was not told. Raises GradientError in fp16."""
    if step.computes_in_fp16 and float(factor) > 1.0:
        raise GradientError(
            f"the loss was scaled by {float(factor):g}, and the backward pass of micro-batches and stages has run in "
            "fp16 inside of the call, unscaled, so that small gradients are zero: pass the scaler to "
            "autopar.compile(..., scaler=scaler)"
        )


def agree_on_scaled(step: Step, gradients: Mapping[str, torch.Tensor], factor: torch.Tensor) -> None:
    """In a pipeline that was not told of a scaler: where `factor` scaled the loss, an overflow is that of all ranks."""
    if len(step.groups.meshes) > 1 and float(factor) != 1.0:
        overflow_together(gradients, step.groups.device)
