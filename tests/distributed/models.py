"""Small models of the distributed tests, with every feature that the runtime must keep."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.captured_once import capture_once


class TiedModel(nn.Module):
    """Embedding tied to the head, a normalised residual block, a frozen bias, a 0-dim scale and a buffer."""

    def __init__(self, vocabulary: int = 20, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.block = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.block[2].bias.requires_grad_(False)
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embedding(tokens)
        hidden = hidden + self.dropout(self.block(self.norm(hidden))) * self.scale
        logits = self.head(hidden) / self.temperature
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class NormalisedModel(nn.Module):
    """A batch norm between two linear layers; returns the loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.second(torch.relu(self.norm(self.first(x)))), y)


def tied_model(seed: int = 0, dropout: float = 0.0) -> TiedModel:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return TiedModel(dropout=dropout)


def tokens(seed: int, batch: int = 8, length: int = 6) -> dict[str, torch.Tensor]:
    """A batch of random tokens and labels."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(0, 20, (2, batch, length), generator=generator)
    return {"tokens": draw[0], "labels": draw[1]}


def captured_tied(dropout: float = 0.0, precision: str | None = None, **_: Any) -> bool:
    """Capture the tied model, which `compile_once` calls "tied model"."""
    return capture_once("tied model", tied_model(dropout=dropout), tokens(0), precision=precision)
