"""A model with an operator of its own that autopar has no rule for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


@torch.library.custom_op("autopar_test::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


@torch.library.custom_op("autopar_test::cube_backward", mutates_args=())
def cube_backward(grad: Tensor, x: Tensor) -> Tensor:
    return 3 * x**2 * grad


@cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@cube_backward.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(context: Any, grad: Tensor) -> Tensor:
    return cube_backward(grad, *context.saved_tensors)


cube.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class UncoveredModel(nn.Module):
    """forward(x (B, 8)) -> mean of a small network around the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(cube(self.first(x))).pow(2).mean()
