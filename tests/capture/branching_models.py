"""Small models with the value-dependent Python of DETR, wav2vec2, Conformer and graph networks, as these write it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SIZE = 8


class Detr(nn.Module):
    """An encoder layer that clamps what overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(x + functional.gelu(self.up(x)))
        if self.training and not torch.isfinite(hidden).all():
            limit = torch.finfo(hidden.dtype).max - 1000
            hidden = torch.clamp(hidden, min=-limit, max=limit)
        return hidden.square().mean()


class Wav2Vec2(nn.Module):
    """Layers left out at random (Hugging Face's and torchaudio's way), padding that is zeroed, masked frames."""

    def __init__(self, layer_drop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))
        self.embedding = nn.Parameter(torch.ones(SIZE) * 0.5)
        self.layer_drop = layer_drop

    def forward(self, x: Tensor, mask: Tensor, masked: Tensor) -> Tensor:
        x = x * 1.0
        x[~mask] = 0
        x[masked] = self.embedding.to(x.dtype)
        for layer in self.layers:
            if not (self.training and torch.rand(1).item() <= self.layer_drop):
                x = x + layer(x).tanh()
        for layer in self.layers:
            drawn = torch.rand([])
            skip = bool(self.training and (drawn < self.layer_drop))
            if not skip:
                x = x + layer(x)
        return x.square().mean()


class Conformer(nn.Module):
    """A padding mask as wide as the longest sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        width = int(torch.max(lengths).item())
        padding = torch.arange(width).expand(len(lengths), width) >= lengths.unsqueeze(1)
        x = self.linear(x[:, :width]).masked_fill(padding.unsqueeze(2), 0.0)
        return x.square().sum() / lengths.sum()


class Graph(nn.Module):
    """GCN's normalisation and GAT's softmax over the edges into a node, both without and with self loops."""

    def __init__(self) -> None:
        super().__init__()
        self.gcn, self.gat = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.attention = nn.Parameter(torch.linspace(-1, 1, SIZE))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        nodes = x.size(0)
        mask = edge_index[0] != edge_index[1]
        loops = torch.arange(nodes).view(1, -1).repeat(2, 1)
        row, col = torch.cat([edge_index[:, mask], loops], dim=1)
        degree = torch.zeros(nodes).scatter_add_(0, col, torch.ones(col.size(0)))
        scale = degree.pow(-0.5)
        scale = scale.masked_fill(scale == float("inf"), 0)
        weight = scale[row] * scale[col]
        x = torch.zeros_like(x).index_add(0, col, self.gcn(x)[row] * weight.unsqueeze(1)).relu()
        h = self.gat(x)
        score = functional.leaky_relu((h * self.attention).sum(1))[row]
        score = (score - score.detach().max()).exp()
        share = score / torch.zeros(nodes).scatter_add(0, col, score)[col]
        return torch.zeros_like(h).index_add(0, col, h[row] * share.unsqueeze(1)).square().mean()


def conformer() -> tuple[nn.Module, dict[str, Any]]:
    """A factory of `autopar plan`."""
    model, inputs, _ = examples()["conformer"]
    return model, inputs


def examples() -> dict[str, tuple[nn.Module, dict[str, Any], dict[str, Any]]]:
    """name -> (model, example inputs, other inputs that take another branch)."""
    torch.manual_seed(0)
    x = torch.randn(8, 6, SIZE)
    frames = torch.arange(6)
    lengths = torch.tensor([5, 3, 4, 5, 2, 5, 1, 4])
    padded = frames < lengths.unsqueeze(1)
    edges = torch.tensor([[0, 1, 2, 3, 4, 4, 6, 7], [1, 2, 2, 0, 5, 4, 7, 6]])
    return {
        "detr": (Detr(), {"x": x}, {"x": x / 0}),
        "wav2vec2": (Wav2Vec2(), {"x": x, "mask": padded, "masked": padded & (frames == 1)}, {}),
        "conformer": (Conformer(), {"x": x, "lengths": lengths}, {"x": x, "lengths": lengths + 1}),
        "graph": (Graph(), {"x": x[:, 0], "edge_index": edges}, {"x": x[:, 0], "edge_index": edges.clamp(min=1)}),
    }
