"""What a strategy makes of a plain model: a step to call, and the tensors that live between steps.

trained = data_parallel.ddp(model, inputs)
loss = trained.step()          # forward, backward, optimizer; None where this rank sees no loss
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.plan_quality.settings import LEARNING_RATE, Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """step: one training step on the whole global batch together with the other ranks; returns this rank's mean loss.
    tensors: what lives between steps, where the memory of a step is counted."""

    step: Callable[[], torch.Tensor | None]
    tensors: Callable[[], Iterable[torch.Tensor]] = tuple


def device_type(model: nn.Module) -> str:
    """Where a mesh of the model's ranks stands: "cpu" or "cuda"."""
    return next(model.parameters()).device.type


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """The same in every strategy; without state, so that rounding is not amplified and losses can be compared."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def trained(module: nn.Module, inputs: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> Trained:
    """Forward, backward and optimizer of a module whose call returns the loss."""

    def step() -> torch.Tensor:
        loss = module(**inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        detached: torch.Tensor = loss.detach()
        return detached

    return Trained(step=step, tensors=lambda: [*module.parameters(), *module.buffers()])


def part(inputs: Inputs, index: int, count: int) -> Inputs:
    """The index-th of `count` equal parts of the batch."""
    return {name: value.chunk(count)[index].clone() for name, value in inputs.items()}


def my_part(inputs: Inputs) -> Inputs:
    """This rank's part, where every rank has one."""
    return part(inputs, dist.get_rank(), dist.get_world_size())
