"""The models of the golden files: as small as the layouts, rules and passes that they show allow."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Stack(nn.Module):
    """Residual blocks of two linear layers, and a head: a plan with stages cuts between `layers`."""

    def __init__(self, layers: int, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return functional.cross_entropy(self.head(x), labels)


class TiedStack(Stack):
    """A stack between an embedding and the head that is tied to it: with stages, the first and the last share it."""

    def __init__(self, layers: int, width: int = 16, vocabulary: int = 20) -> None:
        super().__init__(layers, width, vocabulary)
        self.embedding = nn.Embedding(vocabulary, width)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return super().forward(self.embedding(tokens).flatten(0, 1), labels.flatten())


class GroupedQueries(nn.Module):
    """A Llama of one block: rotated queries, of which two share a key, RMS norms, a gated network."""

    def __init__(self, vocabulary: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.size = width // heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.attention_norm, self.mlp_norm, self.norm = (nn.RMSNorm(width) for _ in range(3))
        self.query, self.output = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self._attention(self.attention_norm(x))
        normed = self.mlp_norm(x)
        x = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())

    def _attention(self, x: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        query, key = self._rotated(query), self._rotated(key)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _rotated(self, x: Tensor) -> Tensor:
        half = self.size // 2
        angles = torch.arange(x.shape[2], device=x.device)[:, None] * 0.1 ** torch.arange(half, device=x.device)
        sine, cosine = angles.sin(), angles.cos()
        first, second = x.chunk(2, -1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class Pictures(nn.Module):
    """Convolutions with batch norms and a shortcut, pooled, and a head."""

    def __init__(self, channels: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(x)))
        x = functional.relu(x + self.second_norm(self.second(x)))
        return functional.cross_entropy(self.head(functional.max_pool2d(x, 2).mean((2, 3))), labels)


class TiedWithDropout(nn.Module):
    """An embedding tied to the head, dropout, a frozen bias, a 0-dim parameter and a buffer."""

    def __init__(self, vocabulary: int = 20, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.down.bias.requires_grad_(False)
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.dropout(self.down(functional.gelu(self.up(self.norm(x))))) * self.scale
        return functional.cross_entropy((self.head(x) / self.temperature).flatten(0, 1), labels.flatten())


def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels; no plan depends on their values."""
    return torch.zeros(batch, length, dtype=torch.long), torch.zeros(batch, length, dtype=torch.long)


def rows(batch: int, width: int = 16) -> tuple[Tensor, Tensor]:
    """Rows of numbers and their labels."""
    return torch.zeros(batch, width), torch.zeros(batch, dtype=torch.long)
