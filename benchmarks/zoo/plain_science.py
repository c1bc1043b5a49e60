"""Science and recommendation in plain torch: a graph network, a Fourier operator, DLRM, a contrastive two-tower."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.registry import Inputs, ZooEntry


class GraphNetwork(nn.Module):
    """Message passing by gather and scatter-add. forward(nodes (N, F), edges (2, E), labels (N,)) -> loss."""

    def __init__(self, features: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.messages = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.updates = nn.ModuleList(nn.GRUCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        x = torch.relu(self.embed(nodes))
        sender, receiver = edges
        degree = torch.zeros(x.shape[0], 1, dtype=x.dtype, device=x.device)
        degree = degree.scatter_add(0, receiver.unsqueeze(1), torch.ones_like(receiver, dtype=x.dtype).unsqueeze(1))
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat([x[sender], x[receiver]], dim=-1))
            gathered = torch.zeros_like(x).index_add_(0, receiver, sent) / degree.clamp(min=1)
            x = update(gathered, x)
        return functional.cross_entropy(self.head(x), labels)


class SpectralConvolution(nn.Module):
    """Complex weights on the lowest `modes` of both Fourier dims."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, channels, channels, modes, modes, 2) / channels**2)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        weight = torch.view_as_complex(self.weight)
        out = torch.zeros_like(spectrum)
        k = self.modes
        out[:, :, :k, :k] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :k, :k], weight[0])
        out[:, :, -k:, :k] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -k:, :k], weight[1])
        field: Tensor = torch.fft.irfft2(out, s=x.shape[-2:])
        return field


class FourierOperator(nn.Module):
    """Fourier neural operator. forward(field (B, 1, H, W), target) -> relative squared error."""

    def __init__(self, channels: int, modes: int, layers: int) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv2d(1, channels, 1), nn.Conv2d(channels, 1, 1)
        self.spectral = nn.ModuleList(SpectralConvolution(channels, modes) for _ in range(layers))
        self.local = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(layers))

    def forward(self, field: Tensor, target: Tensor) -> Tensor:
        x = self.lift(field)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = functional.gelu(spectral(x) + local(x))
        error: Tensor = (self.project(x) - target).square().sum() / target.square().sum()
        return error


class Dlrm(nn.Module):
    """Embedding bags and an MLP whose outputs interact in pairs. forward(dense, sparse (B, T, K), clicks) -> loss."""

    def __init__(self, rows: tuple[int, ...], width: int, dense: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(count, width, mode="sum") for count in rows)
        self.bottom = nn.Sequential(nn.Linear(dense, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU())
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, sparse: Tensor, clicks: Tensor) -> Tensor:
        x = self.bottom(dense)
        looked_up = [table(sparse[:, index]) for index, table in enumerate(self.tables)]
        features = torch.stack([x, *looked_up], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        row, column = torch.tril_indices(features.shape[1], features.shape[1], offset=-1)
        interactions = products[:, row, column]
        logits = self.top(torch.cat([x, interactions], dim=1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, clicks)


class DlrmTables(nn.Module):
    """The same idea with one plain embedding per feature, concatenated. forward(dense, sparse (B, T), clicks)."""

    def __init__(self, rows: tuple[int, ...], width: int, dense: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in rows)
        self.deep = nn.Sequential(nn.Linear(dense + len(rows) * width, 32), nn.ReLU(), nn.Linear(32, 1))
        self.wide = nn.ModuleList(nn.Embedding(count, 1) for count in rows)

    def forward(self, dense: Tensor, sparse: Tensor, clicks: Tensor) -> Tensor:
        columns = sparse.unbind(1)
        deep = torch.cat([dense, *(table(ids) for table, ids in zip(self.tables, columns, strict=True))], dim=1)
        wide = sum(table(ids) for table, ids in zip(self.wide, columns, strict=True))
        return functional.binary_cross_entropy_with_logits((self.deep(deep) + wide).squeeze(1), clicks)


class TwoTower(nn.Module):
    """Contrastive loss between two encoders with a learned 0-dim temperature. forward(left, right) -> loss."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(features, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
        self.right = nn.Sequential(nn.Linear(features, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a = functional.normalize(self.left(left), dim=-1)
        b = functional.normalize(self.right(right), dim=-1)
        logits = self.logit_scale.exp() * a @ b.t()
        labels = torch.arange(logits.shape[0], device=logits.device)
        return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.t(), labels)) / 2


def _graph(batch: int) -> Inputs:
    nodes, edges = 6 * batch, 18 * batch
    return {
        "nodes": torch.randn(nodes, 10),
        "edges": torch.randint(0, nodes, (2, edges)),
        "labels": torch.randint(0, 4, (nodes,)),
    }


def _clicks(batch: int, *bag: int) -> Inputs:
    return {
        "dense": torch.randn(batch, 5),
        "sparse": torch.randint(0, 20, (batch, 3, *bag)),
        "clicks": torch.randint(0, 2, (batch,)).float(),
    }


ENTRIES = (
    ZooEntry(
        name="graph_network",
        family="plain",
        build=lambda: GraphNetwork(10, width=16, layers=2, classes=4),
        inputs=_graph,
    ),
    ZooEntry(
        name="fourier_operator",
        family="plain",
        build=lambda: FourierOperator(8, modes=3, layers=2),
        inputs=lambda batch: {"field": torch.randn(batch, 1, 16, 16), "target": torch.randn(batch, 1, 16, 16)},
    ),
    ZooEntry(
        name="dlrm",
        family="plain",
        build=lambda: Dlrm((20, 24, 31), width=8, dense=5),
        inputs=lambda batch: _clicks(batch, 4),
        batch=8,
    ),
    ZooEntry(
        name="wide_and_deep",
        family="plain",
        build=lambda: DlrmTables((20, 24, 31), width=8, dense=5),
        inputs=_clicks,
        batch=8,
    ),
    ZooEntry(
        name="two_tower",
        family="plain",
        build=lambda: TwoTower(12, width=16),
        inputs=lambda batch: {"left": torch.randn(batch, 12), "right": torch.randn(batch, 12)},
        batch=8,
    ),
)
