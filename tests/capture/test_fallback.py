"""Where numpy stops the trace of a model, Dynamo's graph of its forward is traced, unless it would lose something."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.capture.test_intake import compare


class InNumpy(nn.Module):
    """Weighs a linear layer, tied to a second one, by what numpy computes from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.linear.weight
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        weight = torch.from_numpy(np.tanh(x.detach().numpy()) + 1)
        hidden = functional.relu(self.linear(x)) * weight + self.shift
        return {"loss": self.tied(hidden).square().mean() * scale}


def test_numpy_is_traced_through_dynamo(caplog: pytest.LogCaptureFixture) -> None:
    model = InNumpy()
    with caplog.at_level(logging.WARNING):
        program = compare(model, (torch.randn(3, 4),), {"scale": 2.0})
    assert "captured from Dynamo's graph" in caplog.text
    names = {entry.name for entry in program.inputs if entry.role in ("parameter", "buffer")}
    assert names == {"linear.weight", "linear.bias", "tied.bias", "shift"}
    assert "forward" not in vars(model)


def test_hooks_keep_the_error() -> None:
    model = InNumpy()
    model.linear.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(CaptureError, match="torch operators instead of numpy"):
        capture(model, (torch.randn(3, 4),))


class Doubled(torch.autograd.Function):
    """The identity with twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class OwnGradient(InNumpy):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        return super().forward(Doubled.apply(self.linear(x)), scale=scale)


def test_custom_gradients_keep_the_error() -> None:
    with pytest.raises(CaptureError, match="torch operators instead of numpy"):
        capture(OwnGradient(), (torch.randn(3, 4),))


class NumberFromNumpy(InNumpy):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        return super().forward(x, scale=float(np.mean(x.detach().numpy())))


def test_numbers_from_numpy_keep_the_error_with_the_line() -> None:
    with pytest.raises(CaptureError, match=r"test_fallback.py:\d+.*torch operators instead of numpy"):
        capture(NumberFromNumpy(), (torch.randn(3, 4),))
