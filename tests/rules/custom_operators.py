"""Operators as a user writes them with `torch.library`, and a model around each, for the tests of the user's door."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.rules import engine


@torch.library.custom_op("autopar_door::scaled_silu", mutates_args=())
def scaled_silu(x: Tensor, scale: Tensor) -> Tensor:
    """(M, N), (N) -> (M, N)."""
    return x * torch.sigmoid(scale * x)


@torch.library.custom_op("autopar_door::scaled_silu_backward", mutates_args=())
def scaled_silu_backward(grad: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of scale, which sums over the rows."""
    gate = torch.sigmoid(scale * x)
    slope = gate * (1 - gate) * x
    return grad * (gate + slope * scale), (grad * slope * x).sum(0)


@scaled_silu.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


@scaled_silu_backward.register_fake
def _(grad: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(scale)


@torch.library.custom_op("autopar_door::plain_silu", mutates_args=())
def plain_silu(x: Tensor, scale: Tensor) -> Tensor:
    """The same with a gradient in plain torch."""
    return x * torch.sigmoid(scale * x)


@plain_silu.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = scaled_silu_backward(grad, *ctx.saved_tensors)
    return gradients


def _plain_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, scale = ctx.saved_tensors
    gate = torch.sigmoid(scale * x)
    slope = gate * (1 - gate) * x
    return grad * (gate + slope * scale), (grad * slope * x).sum(0)


scaled_silu.register_autograd(_backward, setup_context=_save)
plain_silu.register_autograd(_plain_backward, setup_context=_save)

SCALED_SILU = "m n, n -> m n"
SCALED_SILU_BACKWARD = "m n, m n, n -> m n, n"

OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"scaled": scaled_silu, "plain": plain_silu}


class Block(nn.Module):
    """forward(x (B, 8)) -> loss of two layers around an operator (B, 16), (16) -> (B, 16), a key of
    `OPERATORS`."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.randn(16))
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.down(OPERATORS[self.operator](self.up(x), self.scale)).pow(2).mean()


def forget_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rules that a test registers or discovers end with it; a fixture of every module that does."""
    monkeypatch.setattr(engine, "_REGISTERED", {})
    monkeypatch.setattr(engine, "_DISCOVERED", {})
    engine.rule_of.cache_clear()
    yield
    engine.rule_of.cache_clear()
