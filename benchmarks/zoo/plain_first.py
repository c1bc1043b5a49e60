"""The first models in plain torch: a residual network with BatchNorm, and stock `nn.TransformerEncoder`."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.vision import ResNet
from benchmarks.zoo.registry import Inputs, ZooEntry


class EncoderClassifier(nn.Module):
    """Stock `nn.TransformerEncoder` under a token classifier. forward(tokens (B, S), labels (B, S)) -> loss."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, activation="gelu")
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.encoder(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _images(batch: int) -> Inputs:
    return {"images": torch.randn(batch, 3, 16, 16), "labels": torch.randint(0, 8, (batch,))}


def _tokens(batch: int) -> Inputs:
    return {"tokens": torch.randint(0, 96, (batch, 16)), "labels": torch.randint(0, 96, (batch, 16))}


ENTRIES = (
    ZooEntry(
        name="resnet",
        family="plain",
        build=lambda: ResNet(width=8, blocks=(1, 1), classes=8),
        inputs=_images,
        batch=8,
    ),
    ZooEntry(
        name="encoder",
        family="plain",
        build=lambda: EncoderClassifier(vocabulary=96, width=32, heads=4, layers=2),
        inputs=_tokens,
    ),
)
