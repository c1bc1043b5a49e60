"""zuko and nflows: normalizing flows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import zuko
from nflows.flows import MaskedAutoregressiveFlow, SimpleRealNVP
from torch import Tensor, nn

from autopar.request.argument_types import Branch
from benchmarks.zoo.registry import ZooEntry

PACKAGES = ("zuko", "nflows")


class NegativeLogLikelihood(nn.Module):
    """forward(x (B, 4), context (B, 3)) -> loss: a flow returns a distribution, whose log_prob is trained."""

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        loss: Tensor = -self.flow(context).log_prob(x).mean()
        return loss


class LogLikelihood(nn.Module):
    """The same of a flow of nflows, forward(x (B, 4)) -> loss."""

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow: Any = flow

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = -self.flow.log_prob(x).mean()
        return loss


def _nflows_entry(name: str, flow: Callable[..., nn.Module]) -> ZooEntry:
    return ZooEntry(
        name=f"nflows/{name}",
        family="tabular",
        build=lambda: LogLikelihood(flow(features=4, hidden_features=32, num_layers=2, num_blocks_per_layer=2)),
        inputs=lambda batch: {"x": torch.randn(batch, 4)},
        batch=16,
    )


def _entry(name: str, flow: Callable[..., Any], branches: Branch | None = None, **arguments: Any) -> ZooEntry:
    return ZooEntry(
        name=f"zuko/{name}",
        family="tabular",
        build=lambda: NegativeLogLikelihood(flow(features=4, context=3, hidden_features=(32, 32), **arguments)),
        inputs=lambda batch: {"x": torch.rand(batch, 4), "context": torch.randn(batch, 3)},
        batch=16,
        branches=branches,
    )


ENTRIES = (
    _entry("nice", zuko.flows.NICE, transforms=2, branches="example"),
    _entry("maf", zuko.flows.MAF, transforms=2),
    _entry("nsf", zuko.flows.NSF, transforms=2),
    _entry("sospf", zuko.flows.SOSPF, transforms=2),
    _entry("bpf", zuko.flows.BPF, transforms=2),
    _nflows_entry("maf", MaskedAutoregressiveFlow),
    _nflows_entry("real_nvp", SimpleRealNVP),
)
