"""The models that train: plain torch, written as a chain where they are one, so that every project can take them.

    Chain(front, layers, head)(x, labels)          # cross_entropy(head(layers(front(x))), labels)

A chain can be cut between its layers (pipelines) and wrapped layer by layer (FSDP2). Attention keeps queries, keys and
values in products of their own and infers the number of heads, as tensor parallelism by DTensor asks for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional


class Chain(nn.Module):
    """Front, layers one after the other, head. forward(x, labels) -> mean cross entropy over all labels."""

    def __init__(self, front: nn.Module, layers: Sequence[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.front = front
        self.layers = nn.ModuleList(layers)
        self.head = head

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.front(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return chain_loss(self.head(hidden), labels)


def chain_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of logits (..., classes) for labels (...)."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


class TokenFront(nn.Module):
    """Token embeddings, and learned positions where `positions` is given. forward(tokens (B, S)) -> (B, S, width)."""

    def __init__(self, vocabulary: int, width: int, positions: int | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = None if positions is None else nn.Parameter(0.02 * torch.randn(positions, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.tokens(tokens)
        return hidden if self.positions is None else hidden + self.positions


class PatchFront(nn.Module):
    """Image patches with learned positions. forward(images (B, 3, H, W)) -> (B, patches, width)."""

    def __init__(self, size: int, patch: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.patches(images).flatten(2).transpose(1, 2).contiguous()
        return hidden + self.positions


class TableFront(nn.Module):
    """One embedding table per field, side by side. forward(ids (B, fields)) -> (B, fields * width)."""

    def __init__(self, rows: int, width: int, fields: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(fields))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(ids[:, field]) for field, table in enumerate(self.tables)], dim=-1)


class Head(nn.Module):
    """Norm and product with the classes; `pooled`: of the mean over the sequence."""

    def __init__(self, norm: nn.Module, width: int, classes: int, *, pooled: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self.output = nn.Linear(width, classes, bias=False)
        self.pooled = pooled

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.pooled:
            hidden = hidden.mean(1)
        logits: torch.Tensor = self.output(self.norm(hidden))
        return logits


class Attention(nn.Module):
    """Attention with heads of `head_width`; grouped keys and values where `kv_heads` is fewer; rotary where asked."""

    def __init__(self, width: int, heads: int, *, kv_heads: int | None = None, causal: bool, rotary: bool) -> None:
        super().__init__()
        self.head_width = width // heads
        kv_width = self.head_width * (kv_heads or heads)
        self.query = nn.Linear(width, width, bias=not rotary)
        self.key = nn.Linear(width, kv_width, bias=not rotary)
        self.value = nn.Linear(width, kv_width, bias=not rotary)
        self.output = nn.Linear(width, width, bias=not rotary)
        self.causal, self.rotary, self.group = causal, rotary, heads // (kv_heads or heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, -1, self.head_width)
        query, key, value = (part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        if self.rotary:
            query, key = rotated(query), rotated(key)
        if self.group > 1:
            key, value = key.repeat_interleave(self.group, 1), value.repeat_interleave(self.group, 1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        result: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, -1))
        return result


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of x (B, heads, S, head width)."""
    length, width = x.shape[-2:]
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.outer(torch.arange(length, device=x.device), frequencies)
    cosine, sine = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class Gelu(nn.Module):
    """Two products with GELU between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return result


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return result


class Experts(nn.Module):
    """A mixture: every token goes through `chosen` of `count` gated experts; none is dropped."""

    def __init__(self, width: int, hidden: int, count: int, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(Gated(width, hidden) for _ in range(count))
        self.chosen = chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        weights, picked = torch.topk(self.router(rows).softmax(-1), self.chosen, dim=-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(picked == number)
            out.index_add_(0, token, (expert(rows[token]) * weights[token, place, None]).to(out.dtype))
        return out.view_as(x)


class Block(nn.Module):
    """Attention and what follows it, each behind a norm and beside a residual."""

    def __init__(self, attention: nn.Module, feed_forward: nn.Module, norms: Sequence[nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = norms
        self.attention, self.feed_forward = attention, feed_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        result: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return result


class Dense(nn.Module):
    """A pair of products with ReLU, of a tower: (B, width) -> (B, width)."""

    def __init__(self, width: int, hidden: int, output: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.down(torch.relu(self.up(x))))


def gpt(*, layers: int, width: int, heads: int, vocabulary: int, positions: int) -> Chain:
    """A GPT with learned positions."""
    return Chain(
        TokenFront(vocabulary, width, positions),
        [
            Block(
                Attention(width, heads, causal=True, rotary=False),
                Gelu(width, 4 * width),
                [nn.LayerNorm(width), nn.LayerNorm(width)],
            )
            for _ in range(layers)
        ],
        Head(nn.LayerNorm(width), width, vocabulary),
    )


def llama(*, layers: int, width: int, hidden: int, heads: int, kv_heads: int, vocabulary: int) -> Chain:
    """A Llama: RMSNorm, rotary positions, grouped keys and values, SwiGLU."""
    return Chain(
        TokenFront(vocabulary, width),
        [
            Block(
                Attention(width, heads, kv_heads=kv_heads, causal=True, rotary=True),
                Gated(width, hidden),
                [nn.RMSNorm(width), nn.RMSNorm(width)],
            )
            for _ in range(layers)
        ],
        Head(nn.RMSNorm(width), width, vocabulary),
    )


def mixture(*, layers: int, width: int, hidden: int, heads: int, experts: int, chosen: int, vocabulary: int) -> Chain:
    """A Llama whose feed-forward layers are mixtures of experts."""
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


def vit(*, layers: int, width: int, heads: int, size: int, patch: int, classes: int) -> Chain:
    """A vision transformer that classifies by the mean of its patches."""
    return Chain(
        PatchFront(size, patch, width),
        [
            Block(
                Attention(width, heads, causal=False, rotary=False),
                Gelu(width, 4 * width),
                [nn.LayerNorm(width), nn.LayerNorm(width)],
            )
            for _ in range(layers)
        ],
        Head(nn.LayerNorm(width), width, classes, pooled=True),
    )


def recommender(*, rows: int, width: int, fields: int, hidden: int, layers: int) -> Chain:
    """Embedding tables whose rows are most of the parameters, and a tower."""
    whole = width * fields
    return Chain(
        TableFront(rows, width, fields),
        [Dense(whole, hidden, whole) for _ in range(layers)],
        Head(nn.Identity(), whole, 2),
    )


class Pair(nn.Module):
    """Two products: small enough that all its plans can be measured. forward(x (B, width), y (B, width)) -> loss."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.down(torch.relu(self.up(x))), y)
