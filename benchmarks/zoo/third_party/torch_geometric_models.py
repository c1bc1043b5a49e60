"""torch_geometric: networks of graphs. A batch is one graph of several components, as its DataLoader makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric import nn as geometric

from benchmarks.zoo.registry import Inputs, ZooEntry

PACKAGES = ("torch_geometric",)
NODES, EDGES, FEATURES, CLASSES = 6, 14, 8, 3
"""Nodes and edges of one component."""


def _edges(batch: int) -> Tensor:
    offsets = NODES * torch.arange(batch).repeat_interleave(EDGES)
    return torch.randint(0, NODES, (2, batch * EDGES)) + offsets


def _graph(batch: int) -> Inputs:
    return {
        "x": torch.randn(batch * NODES, FEATURES),
        "edge_index": _edges(batch),
        "labels": torch.randint(0, CLASSES, (batch * NODES,)),
    }


def _graphs(batch: int) -> Inputs:
    return {
        "x": torch.randn(batch * NODES, FEATURES),
        "edge_index": _edges(batch),
        "graph_of": torch.arange(batch).repeat_interleave(NODES),
        "labels": torch.randint(0, CLASSES, (batch,)),
    }


def _molecules(batch: int) -> Inputs:
    return {
        "z": torch.randint(1, 9, (batch * NODES,)),
        "pos": torch.randn(batch * NODES, 3),
        "graph_of": torch.arange(batch).repeat_interleave(NODES),
        "energy": torch.randn(batch, 1),
    }


class _Two(nn.Module):
    """Two layers of one kind, as in the package's examples."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return cast(Tensor, self.second(functional.elu(self.first(x, edge_index)), edge_index))


class _Pooled(nn.Module):
    """A network of nodes and a readout of graphs; their number is an argument, as the package advises."""

    def __init__(self, network: nn.Module, readout: nn.Module, width: int, graphs: int) -> None:
        super().__init__()
        self.network, self.readout, self.graphs = network, readout, graphs
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, graph_of: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.readout(self.network(x, edge_index), graph_of, dim_size=self.graphs)))


class _AutoEncoder(nn.Module):
    """The loss of a graph autoencoder with edges that are no edges as an input: the package draws them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, edge_index: Tensor, no_edges: Tensor) -> Tensor:
        model = cast(Any, self.model)
        code = model.encode(x, edge_index)
        return cast(Tensor, model.recon_loss(code, edge_index, no_edges))


class _Complete(nn.Module):
    """The interaction graph of SchNet: all pairs of atoms of a molecule; the default needs a compiled library."""

    def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.cartesian_prod(torch.arange(NODES), torch.arange(NODES))
        pairs = pairs[torch.arange(len(pairs)) % (NODES + 1) != 0].T
        edges = torch.cat([pairs + NODES * graph for graph in range(len(batch) // NODES)], dim=1)
        return edges, (pos[edges[0]] - pos[edges[1]]).norm(dim=-1)


class _SchNet(nn.Module):
    """SchNet with `batch`, of which graph an atom is, under another name: a loss of autopar takes that one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = geometric.SchNet(
            hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=8, interaction_graph=_Complete()
        )

    def forward(self, z: Tensor, pos: Tensor, graph_of: Tensor) -> Tensor:
        return cast(Tensor, self.model(z, pos, graph_of))


def _cross_entropy(output: Any, batch: Inputs) -> Tensor:
    return functional.cross_entropy(output, batch["labels"])


def _energy(output: Any, batch: Inputs) -> Tensor:
    return functional.mse_loss(output, batch["energy"])


def _whole(inputs: Inputs) -> dict[str, None]:
    """No input has a dim of the batch: an edge may join any two nodes. Those of the loss are named `batch.`."""
    names = [name for name in inputs if name not in ("labels", "energy")]
    return dict.fromkeys([*names, *(f"batch.{name}" for name in inputs)])


def _entry(
    name: str,
    build: Callable[[], nn.Module],
    inputs: Callable[[int], Inputs] = _graph,
    loss_fn: Callable[[Any, Any], Tensor] | None = _cross_entropy,
    **others: Any,
) -> ZooEntry:
    return ZooEntry(
        name=f"torch_geometric/{name}",
        family="graph",
        build=build,
        inputs=inputs,
        loss_fn=loss_fn,
        batch_dims=_whole(inputs(2)) if loss_fn is not None else dict.fromkeys(inputs(2)),
        **{"branches": "example", **others},
    )


def _mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


SIZES = {"in_channels": FEATURES, "hidden_channels": 16, "num_layers": 2, "out_channels": CLASSES}
DEGREES = torch.tensor([0, 4, 8, 8, 4])

ENTRIES = (
    _entry("gcn", lambda: geometric.GCN(**SIZES)),
    _entry("graph_sage", lambda: geometric.GraphSAGE(**SIZES, aggr="max", jk="cat")),
    _entry("gin", lambda: geometric.GIN(**SIZES, norm="batch_norm")),
    _entry("gat", lambda: geometric.GAT(**SIZES, heads=4)),
    _entry("gat_v2", lambda: geometric.GAT(**SIZES, heads=4, v2=True)),
    _entry("edge_cnn", lambda: geometric.EdgeCNN(**SIZES)),
    _entry(
        "pna",
        lambda: geometric.PNA(
            **SIZES, aggregators=["mean", "max", "std"], scalers=["identity", "amplification"], deg=DEGREES
        ),
    ),
    _entry(
        "transformer_conv",
        lambda: _Two(
            geometric.TransformerConv(FEATURES, 4, heads=4, beta=True), geometric.TransformerConv(16, CLASSES)
        ),
    ),
    _entry("cheb", lambda: _Two(geometric.ChebConv(FEATURES, 16, K=3), geometric.ChebConv(16, CLASSES, K=2))),
    _entry("appnp", lambda: _Two(geometric.GCNConv(FEATURES, CLASSES), geometric.APPNP(K=3, alpha=0.1))),
    _entry(
        "gated_graph_conv",
        lambda: _Two(geometric.GatedGraphConv(16, num_layers=2), geometric.GraphConv(16, CLASSES)),
    ),
    _entry("arma", lambda: _Two(geometric.ARMAConv(FEATURES, 16, num_stacks=2), geometric.TAGConv(16, CLASSES))),
    _entry(
        "set2set",
        lambda: _Pooled(
            geometric.GCN(FEATURES, 16, 2), geometric.aggr.Set2Set(16, processing_steps=2), width=32, graphs=4
        ),
        _graphs,
    ),
    _entry(
        "attentional_readout",
        lambda: _Pooled(
            geometric.GIN(FEATURES, 16, 2), geometric.aggr.AttentionalAggregation(_mlp(16, 1)), width=16, graphs=4
        ),
        _graphs,
    ),
    _entry(
        "gae",
        lambda: _AutoEncoder(geometric.GAE(geometric.GCN(FEATURES, 16, 2, 8))),
        lambda batch: {
            "x": torch.randn(batch * NODES, FEATURES),
            "edge_index": _edges(batch),
            "no_edges": _edges(batch),
        },
        None,
    ),
    _entry(
        "schnet",
        _SchNet,
        _molecules,
        _energy,
    ),
)
