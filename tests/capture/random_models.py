"""One small module per random operator of torch; each draws in its forward and returns a scalar loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Draw = Callable[[Tensor], Tensor]


class Drawing(nn.Module):
    """A linear layer, `draw` of its output, and a mean that weighs every element differently."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        h = self.draw(self.linear(x))
        weights = torch.linspace(-1.0, 2.0, h.numel()).reshape(h.shape)
        return (h * weights).mean()


def _stochastic_depth(h: Tensor) -> Tensor:
    keep = torch.floor(0.7 + torch.rand(h.shape[0], *[1] * (h.dim() - 1), dtype=h.dtype))
    return h / 0.7 * keep


def _in_place(h: Tensor, name: str, *args: float) -> Tensor:
    return h * getattr(torch.empty_like(h), name)(*args)


def _probabilities(h: Tensor) -> Tensor:
    return torch.sigmoid(h.detach())


def _block(h: Tensor) -> Tensor:
    return F.dropout(torch.tanh(h), 0.4) * torch.rand_like(h) + torch.native_dropout(h.sin(), 0.2, True)[0].sin()


def _checkpointed(h: Tensor, use_reentrant: bool = False) -> Tensor:
    for _ in range(2):
        h = checkpoint(_block, h, use_reentrant=use_reentrant, preserve_rng_state=True)
    return h


DRAWS: dict[str, Draw] = {
    "dropout": lambda h: F.dropout(h, 0.4),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.4, training=True),
    "feature_alpha_dropout": lambda h: F.feature_alpha_dropout(h, 0.4, training=True),
    "dropout1d": lambda h: F.dropout1d(h, 0.4),
    "dropout2d": lambda h: F.dropout2d(h.unsqueeze(-1), 0.4),
    "dropout3d": lambda h: F.dropout3d(h[..., None, None], 0.4),
    "native_dropout": lambda h: torch.native_dropout(h, 0.4, True)[0],
    "rand": lambda h: h * torch.rand(h.shape),
    "randn": lambda h: h * torch.randn(h.shape),
    "rand_like": lambda h: h * torch.rand_like(h),
    "randn_like": lambda h: h * torch.randn_like(h),
    "randint": lambda h: h * torch.randint(-3, 9, h.shape),
    "randint_like": lambda h: h * torch.randint_like(h, 7),
    "randperm": lambda h: h[:, torch.randperm(h.shape[1])],
    "bernoulli": lambda h: h * torch.bernoulli(_probabilities(h)),
    "bernoulli_float": lambda h: _in_place(h, "bernoulli_", 0.3),
    "bernoulli_tensor": lambda h: h * torch.empty_like(h).bernoulli_(_probabilities(h)),
    "uniform_": lambda h: _in_place(h, "uniform_", -2.0, 3.0),
    "normal_": lambda h: _in_place(h, "normal_", 1.0, 2.0),
    "exponential_": lambda h: _in_place(h, "exponential_", 1.5),
    "log_normal_": lambda h: _in_place(h, "log_normal_", 0.1, 0.4),
    "geometric_": lambda h: _in_place(h, "geometric_", 0.3),
    "cauchy_": lambda h: _in_place(h, "cauchy_", 0.1, 0.4),
    "normal_tensors": lambda h: h * torch.normal(h.detach(), _probabilities(h)),
    "normal_mean": lambda h: h * torch.normal(h.detach(), 0.5),
    "normal_sized": lambda h: h * torch.normal(1.0, 2.0, tuple(h.shape)),
    "multinomial": lambda h: h.flatten(0, -2).gather(-1, torch.multinomial(_probabilities(h).flatten(0, -2), 3)),
    "multinomial_replacement": lambda h: h.flatten(0, -2).gather(
        -1, torch.multinomial(_probabilities(h).flatten(0, -2), 5, replacement=True)
    ),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h),
    "gumbel_softmax_hard": lambda h: F.gumbel_softmax(h, hard=True),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "stochastic_depth": _stochastic_depth,
    "attention": lambda h: F.scaled_dot_product_attention(*[h.unsqueeze(1)] * 3, dropout_p=0.3),
    "attention_module": lambda h: nn.functional.dropout(torch.softmax(h @ h.mT, -1), 0.3) @ h,
    "plain_blocks": lambda h: _block(_block(h)),
    "checkpoint": _checkpointed,
    "checkpoint_reentrant": lambda h: _checkpointed(h, True),
}
