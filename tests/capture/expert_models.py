"""Mixtures of experts as people write them in plain torch: each model has another way to find and add the rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HIDDEN, NUM_EXPERTS, NUM_CHOSEN, CLASSES = 8, 12, 4, 2, 6


class Expert(nn.Module):
    """A gated linear unit with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Tokens (batch, length) -> loss, with one expert layer between an embedding and a head."""

    def __init__(self, loop: Callable[[Mixture, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.loop = loop

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        weights, chosen = functional.softmax(self.router(x), -1).topk(NUM_CHOSEN, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = self.loop(self, x, weights, chosen)
        return functional.cross_entropy(self.head(x + out).flatten(0, 1), labels.flatten())


def one_hot(model: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """One-hot mask, torch.where, index_add_."""
    flat = x.view(-1, WIDTH)
    weights, chosen = weights.view(-1, NUM_CHOSEN), chosen.view(-1, NUM_CHOSEN)
    out = torch.zeros_like(flat)
    mask = functional.one_hot(chosen, num_classes=NUM_EXPERTS).permute(2, 1, 0)
    for e, expert in enumerate(model.experts):
        choice, token = torch.where(mask[e])
        out.index_add_(0, token, expert(flat[token]) * weights[token, choice, None])
    return out.view_as(x)


def hits(model: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Only the experts that have rows, with `hidden[None, top_x]`."""
    flat = x.view(-1, WIDTH)
    weights, chosen = weights.view(-1, NUM_CHOSEN), chosen.view(-1, NUM_CHOSEN)
    out = torch.zeros_like(flat)
    mask = functional.one_hot(chosen, num_classes=NUM_EXPERTS).permute(2, 1, 0)
    for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        choice, token = torch.where(mask[hit].squeeze(0))
        rows = model.experts[hit[0]](flat[None, token].reshape(-1, WIDTH)) * weights[token, choice, None]
        out.index_add_(0, token, rows.to(out.dtype).to(out.device).view(-1, out.shape[-1]))
    return out.view_as(x)


def equal(model: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """`chosen == e` on ids reshaped anew for every expert, and `out[token] += ...`."""
    flat = x.view(-1, WIDTH)
    weights = weights.view(-1, NUM_CHOSEN)
    out = torch.zeros_like(flat)
    for e, expert in enumerate(model.experts):
        token, choice = torch.where(chosen.view(-1, NUM_CHOSEN) == e)
        if token.numel() == 0:
            continue
        out[token] += weights[token, choice, None] * expert(flat[token])
    return out.view_as(x)


def masks(model: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Bool masks over (batch, length), the routing weight from the column of the expert."""
    gates = torch.zeros(*chosen.shape[:-1], NUM_EXPERTS, dtype=x.dtype).scatter(-1, chosen, weights)
    flat, flat_gates, out = x.view(-1, WIDTH), gates.view(-1, NUM_EXPERTS), torch.zeros_like(x)
    for e, expert in enumerate(model.experts):
        mask = (chosen == e).any(dim=-1)
        flat_mask = mask.view(-1)
        if flat_mask.any():
            rows = expert(flat[flat_mask]) * flat_gates[flat_mask, e].unsqueeze(1)
            out[mask] += rows.squeeze(1)
    return out


def counts(model: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """A count per expert asked first, an out-of-place index_add."""
    flat = x.view(-1, WIDTH)
    weights, chosen = weights.view(-1, NUM_CHOSEN), chosen.view(-1, NUM_CHOSEN)
    out = torch.zeros_like(flat)
    count = torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS)
    for e in range(NUM_EXPERTS):
        if count[e] == 0:
            continue
        token, choice = (chosen == e).nonzero(as_tuple=True)
        out = out.index_add(0, token, model.experts[e](flat[token]) * weights[token, choice].unsqueeze(-1))
    return out.view_as(x)


def assigned(model: Mixture, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Top 1, capacity per sequence, rows put in place of what stands there (Switch)."""
    first = functional.one_hot(chosen[..., 0], num_classes=NUM_EXPERTS)
    first = first * (first.cumsum(dim=-2) <= 2)
    out = x.clone()
    for e, expert in enumerate(model.experts):
        token = first[:, :, e].bool()
        out[token] = expert(x[token]).to(x.dtype)
    return weights[..., :1] * out


LOOPS = {loop.__name__: loop for loop in (one_hot, hits, equal, masks, counts, assigned)}


def mixture(name: str) -> tuple[Mixture, dict[str, Tensor]]:
    """Model in fp64, which routes alike on every machine, and inputs in which one expert has few rows."""
    torch.manual_seed(0)
    draw = torch.randint(0, 20, (2, 4, 6))
    return Mixture(LOOPS[name]).double(), {"tokens": draw[0], "labels": draw[1] % CLASSES}
