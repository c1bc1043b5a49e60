"""A small Llama: RMSNorm, rotary positions, grouped queries, SwiGLU, causal; its attention may be another function.

    decoder(layers=2, width=128, hidden=256, heads=8, kv_heads=2, vocabulary=256)(x, labels)     # mean cross entropy
    split_by_sequence(model, mix, start)     # the same on tokens start, start + 1, ... of the sequence
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional

from benchmarks.plan_quality.models import Block, Chain, Gated, Head, TokenFront

Mix: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries (B, H, S, D), keys and values (B, G, S, D), G divides H -> (B, H, S, D)."""
ROTARY_BASE = 10000.0


class GroupedAttention(nn.Module):
    """Causal attention of `heads` over `kv_heads`. start: position of the first token; mix: what attends."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.start = 0
        self.mix: Mix = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, -1, self.head_width)
        query, key, value = (part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = self.mix(turned(query, self.start), turned(key, self.start), value)
        result: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, -1))
        return result


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """All of the sequence, on one device."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def turned(x: torch.Tensor, start: int) -> torch.Tensor:
    """Rotary positions of x (B, heads, S, head width), whose first row is at position `start`."""
    length, width = x.shape[-2:]
    frequencies = ROTARY_BASE ** (-torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.outer(torch.arange(start, start + length, device=x.device), frequencies)
    cosine, sine = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


def decoder(*, layers: int, width: int, hidden: int, heads: int, kv_heads: int, vocabulary: int) -> Chain:
    """The model. forward(x (B, S), labels (B, S)) -> mean cross entropy."""
    return Chain(
        TokenFront(vocabulary, width),
        [
            Block(
                GroupedAttention(width, heads, kv_heads),
                Gated(width, hidden),
                [nn.RMSNorm(width), nn.RMSNorm(width)],
            )
            for _ in range(layers)
        ],
        Head(nn.RMSNorm(width), width, vocabulary),
    )


def split_by_sequence(model: nn.Module, mix: Mix, start: int) -> None:
    """Let the model take a block of the sequence: its attention begins at `start` and is `mix`."""
    for module in model.modules():
        if isinstance(module, GroupedAttention):
            module.start, module.mix = start, mix
