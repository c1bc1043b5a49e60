"""Twelve settings of one emulated device: a model, a part of the bytes that it takes, the rate of the link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.hardware.cluster import Cluster
from autopar.hardware.hosts import Host, HostLink
from autopar.request.offload import Offload
from benchmarks.plan_quality.models import Chain, Head, gpt, llama, mixture

SEED = 0
Inputs = dict[str, torch.Tensor]


class Residual(nn.Module):
    """Two convolutions with norms beside a residual: (B, C, H, W) -> (B, C, H, W)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(hidden)))


class Pooled(nn.Module):
    """Mean over the picture, and a product with the classes."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.output(x.mean((2, 3)))
        return result


def chain(layers: int, width: int) -> Chain:
    """Products and tanh."""
    parts = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    return Chain(nn.Identity(), parts, Head(nn.Identity(), width, 16))


def resnet(layers: int, channels: int) -> Chain:
    """Residual blocks of one size."""
    return Chain(nn.Conv2d(3, channels, 3, padding=1), [Residual(channels) for _ in range(layers)],
                 Pooled(channels, 16))  # fmt: skip


def tokens(batch: int, length: int, vocabulary: int) -> Inputs:
    """Random tokens and labels (batch, length)."""
    return {name: torch.randint(0, vocabulary, (batch, length)) for name in ("x", "labels")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """build: by number of layers; inputs: keywords of forward."""

    layers: int
    build: Callable[[int], Chain]
    inputs: Callable[[], Inputs]

    def made(self, layers: int | None = None) -> tuple[Chain, Inputs]:
        """The same in every process."""
        torch.manual_seed(SEED)
        return self.build(layers or self.layers).train(), self.inputs()


MODELS: Mapping[str, Model] = {
    "chain": Model(
        layers=12,
        build=lambda layers: chain(layers, 256),
        inputs=lambda: {"x": torch.randn(4096, 256), "labels": torch.randint(0, 16, (4096,))},
    ),
    "gpt": Model(
        layers=4,
        build=lambda layers: gpt(layers=layers, width=192, heads=4, vocabulary=512, positions=64),
        inputs=lambda: tokens(32, 64, 512),
    ),
    "llama": Model(
        layers=4,
        build=lambda layers: llama(layers=layers, width=192, hidden=512, heads=4, kv_heads=2, vocabulary=512),
        inputs=lambda: tokens(16, 128, 512),
    ),
    "resnet": Model(
        layers=6,
        build=lambda layers: resnet(layers, 32),
        inputs=lambda: {"x": torch.randn(8, 3, 32, 32), "labels": torch.randint(0, 16, (8,))},
    ),
    "mixture": Model(
        layers=3,
        build=lambda layers: mixture(
            layers=layers, width=160, hidden=320, heads=4, experts=4, chosen=2, vocabulary=512
        ),
        inputs=lambda: tokens(16, 64, 512),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """share: of the peak of the step with everything on the device, which the device has; rate: of the link in either
    direction, bytes per second, both at once."""

    model: str
    share: float
    rate: float
    offload: Offload

    @property
    def name(self) -> str:
        return f"{self.model}, {self.share:.0%}, {self.rate / 1e9:g} GB/s, {self.offload}"


SETTINGS: tuple[Setting, ...] = (
    Setting(model="chain", share=0.5, rate=2e9, offload="activations"),
    Setting(model="chain", share=0.5, rate=0.5e9, offload="activations"),
    Setting(model="chain", share=0.35, rate=1e9, offload="all"),
    Setting(model="gpt", share=0.6, rate=2e9, offload="activations"),
    Setting(model="gpt", share=0.6, rate=0.5e9, offload="activations"),
    Setting(model="gpt", share=0.45, rate=1e9, offload="all"),
    Setting(model="llama", share=0.6, rate=2e9, offload="activations"),
    Setting(model="llama", share=0.5, rate=1e9, offload="all"),
    Setting(model="resnet", share=0.6, rate=2e9, offload="activations"),
    Setting(model="resnet", share=0.5, rate=0.5e9, offload="activations"),
    Setting(model="mixture", share=0.7, rate=2e9, offload="activations"),
    Setting(model="mixture", share=0.6, rate=1e9, offload="parameters"),
)


def link(rate: float) -> HostLink:
    """Both ways at once."""
    return HostLink(name="emulated", latency_seconds=2e-5, to_host_bytes_per_second=rate,
                    from_host_bytes_per_second=rate, both_bytes_per_second=2 * rate)  # fmt: skip


def cluster(rate: float) -> Cluster:
    """This machine as measured, one process, with a host behind such a link."""
    found = Cluster.detect(1)
    return replace(found, host=Host(memory_bytes=1 << 34, memory_bytes_per_second=1e10, link=link(rate)))


def rungs(setting: Setting, layers: int) -> dict[str, dict[str, Any]]:
    """Options of `autopar.plan`: the plan, and what somebody would pin by hand."""
    alternate = {f"layers.{number}": {"recompute": "full"} for number in range(0, layers, 2)}
    return {
        "plan": {"offload": setting.offload},
        "saved": {"recompute": "none"},
        "recomputed": {"recompute": "full"},
        "searched without host": {},
        "on host": {"offload": setting.offload, "recompute": "none"},
        "every other block recomputed": {"offload": setting.offload, "constraints": alternate},
    }
