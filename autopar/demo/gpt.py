"""A GPT in plain torch, as a user would write it: nothing in it knows of autopar.

model = GPT(GPTConfig(vocabulary=256, positions=128, width=128, heads=4, layers=4))
loss = model(tokens, labels)                    # tokens, labels: int64 (batch, sequence)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT. `heads` divides `width`."""

    vocabulary: int
    positions: int
    width: int
    heads: int
    layers: int


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) -> the same shape."""
        batch, sequence, width = x.shape
        query, key, value = (
            project(x).view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return out


class Block(nn.Module):
    """Pre-norm transformer block: attention, then a feed-forward network of four times the width."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) -> the same shape."""
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return out


class GPT(nn.Module):
    """Decoder-only language model with tied token embeddings. forward(tokens, labels) -> mean cross entropy."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Tokens and labels (batch, sequence) -> the mean loss."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
