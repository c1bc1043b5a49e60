"""A small Llama whose feed-forward layers are mixtures of experts, as people write them: a loop over all experts.

    decoder(layers=2, width=128, hidden=512, heads=4, experts=4, chosen=2, vocabulary=256)(x, labels)
    settle(model, tokens, exponent=1.0)      # from now on the loads of experts fall by Zipf's law
    loads(model, tokens)                     # (layers, experts): parts of all rows

Which experts a token takes is decided by its scores and a bias per expert, a buffer that takes no part in the weights
of their results: so are models trained that balance loads without a loss (arXiv 2408.15664). `settle` finds biases by
the rule of that paper, a little up where an expert has less than it should have, even loads or skewed ones.

Weights of all experts are one parameter. Of experts that are modules of their own a plan stores each split over all
ranks, so that it would exchange weights in every step beside the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.plan_quality.models import Attention, Block, Chain, Head, TokenFront

ROUNDS = 200
"""Updates of a layer's biases, each smaller than the one before."""


class GatedExperts(nn.Module):
    """SwiGLU `count` times, one parameter for a matrix of all experts, as torchtitan and transformers hold them.

    forward(rows (T, width), number): of one expert."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Parameter(torch.empty(count, wide, narrow).uniform_(-(narrow**-0.5), narrow**-0.5))
            for wide, narrow in ((hidden, width), (hidden, width), (width, hidden))
        )

    def forward(self, rows: Tensor, number: int) -> Tensor:
        linear = functional.linear
        hidden = functional.silu(linear(rows, self.gate[number])) * linear(rows, self.up[number])
        return linear(hidden, self.down[number])


class Experts(nn.Module):
    """A mixture: every token goes through `chosen` of `count` gated experts; none is dropped. (B, S, D) -> (B, S, D).

    combine: how the results come together, in a loop unless somebody knows better."""

    bias: Tensor

    def __init__(self, width: int, hidden: int, count: int, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = GatedExperts(width, hidden, count)
        self.register_buffer("bias", torch.zeros(count))
        self.count, self.chosen = count, chosen
        self.combine: Combine = looped

    def scores(self, rows: Tensor) -> Tensor:
        """Of all experts (T, experts)."""
        return torch.softmax(self.router(rows), -1)

    def picked(self, scores: Tensor) -> Tensor:
        """The ids of every token's experts (T, chosen)."""
        return torch.topk(scores + self.bias, self.chosen, dim=-1)[1]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        scores = self.scores(rows)
        picked = self.picked(scores)
        weights = scores.gather(-1, picked)
        return self.combine(self, rows, weights / weights.sum(-1, keepdim=True), picked).view_as(x)


Combine: TypeAlias = Callable[[Experts, Tensor, Tensor, Tensor], Tensor]
"""Rows (T, D), weights and ids of the chosen experts (T, chosen) -> weighted sums of their results (T, D)."""


def looped(layer: Experts, rows: Tensor, weights: Tensor, picked: Tensor) -> Tensor:
    """On one device: the rows of one expert after the other."""
    out = torch.zeros_like(rows)
    for number in range(layer.count):
        token, place = torch.where(picked == number)
        out.index_add_(0, token, layer.experts(rows[token], number) * weights[token, place, None])
    return out


def decoder(
    *, layers: int, width: int, hidden: int, heads: int, experts: int, chosen: int, vocabulary: int
) -> Chain:
    """The model. forward(x (B, S), labels (B, S)) -> mean cross entropy."""
    return Chain(
        TokenFront(vocabulary, width),
        [
            Block(
                Attention(width, heads, causal=True, rotary=True),
                Experts(width, hidden, experts, chosen),
                [nn.RMSNorm(width), nn.RMSNorm(width)],
            )
            for _ in range(layers)
        ],
        Head(nn.RMSNorm(width), width, vocabulary),
    )


def expert_layers(model: nn.Module) -> Iterator[Experts]:
    """In the order of forward."""
    return (module for module in model.modules() if isinstance(module, Experts))


def wanted_loads(experts: int, exponent: float) -> Tensor:
    """Parts of all rows (experts,): the i-th hottest expert has i**-exponent of the hottest's. Hot ones lie anywhere
    among the others, the same every time."""
    parts = torch.arange(1, experts + 1, dtype=torch.float64) ** -exponent
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(experts))
    return (parts / parts.sum())[order]


def settle(model: Chain, tokens: Tensor, exponent: float) -> None:
    """Give every layer the biases under which `tokens` (B, S) load its experts as `wanted_loads` says."""

    def settled(layer: Experts, inputs: tuple[Tensor]) -> None:
        scores = layer.scores(inputs[0].flatten(0, -2))
        wanted = wanted_loads(layer.count, exponent)
        for turn in range(ROUNDS):
            missing = wanted - _loads(layer, scores)
            layer.bias += missing.sign().to(scores.dtype) * scores.std() / (5.0 + turn)

    _watched(model, tokens, settled)


def loads(model: Chain, tokens: Tensor) -> Tensor:
    """What part of all rows every expert has (layers, experts)."""
    found: list[Tensor] = []

    def seen(layer: Experts, inputs: tuple[Tensor]) -> None:
        found.append(_loads(layer, layer.scores(inputs[0].flatten(0, -2))))

    _watched(model, tokens, seen)
    return torch.stack(found)


def _watched(model: Chain, tokens: Tensor, seen: Callable[[Experts, tuple[Tensor]], None]) -> None:
    """A forward in which every mixture is shown with its input first."""
    handles = [layer.register_forward_pre_hook(seen) for layer in expert_layers(model)]
    with torch.no_grad():
        model(tokens, tokens)
    for handle in handles:
        handle.remove()


def _loads(layer: Experts, scores: Tensor) -> Tensor:
    picked = layer.picked(scores)
    return torch.bincount(picked.flatten(), minlength=layer.count).double() / picked.numel()
