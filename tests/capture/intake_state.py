"""Models whose parameters and buffers are unusual: tied, mutated, of mixed dtypes, parametrized, unused."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from tests.capture.small_models import Case

X = (4, 8)


def on_x(model: nn.Module) -> Case:
    """The model with one input of shape (4, 8)."""
    return model, (torch.randn(*X),), {}


class Autoencoder(nn.Module):
    """The decoder multiplies by the transposed weight of the encoder: tied across shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 6)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x).tanh()
        return functional.mse_loss(functional.linear(hidden, self.encoder.weight.t(), self.bias), x)


class TiedViews(nn.Module):
    """Two parameters of different shapes that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 6, bias=False)
        self.decoder = nn.Linear(6, 8, bias=False)
        self.decoder.weight = nn.Parameter(self.encoder.weight.data.t())

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(self.decoder(self.encoder(x).tanh()), x)


class RunningStatistics(nn.Module):
    """Every way in which buffers are updated: EMA in place, counters, index assignment, non-persistent ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("ema", torch.zeros(8))
        self.register_buffer("step", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool), persistent=False)
        self.register_buffer("last", torch.zeros(2, 8), persistent=False)
        self.ema: Tensor
        self.step: Tensor
        self.seen: Tensor
        self.last: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x) - self.ema
        with torch.no_grad():
            self.ema.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            self.step += 1
            self.seen[1] = True
            self.last[0] = hidden.detach()[0]
        return (hidden * (1 + self.step)).pow(2).mean()


class AssignedBuffer(nn.Module):
    """Buffers that take a new tensor by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return (hidden - self.mean).pow(2).mean()


class MixedDtypes(nn.Module):
    """A bf16 body, an fp32 norm, an fp64 island, int and bool buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8).to(torch.bfloat16)
        self.norm = nn.LayerNorm(8)
        self.island = nn.Parameter(torch.rand(8, dtype=torch.float64))
        self.register_buffer("order", torch.randperm(8))
        self.register_buffer("keep", torch.rand(8) > 0.3)
        self.order: Tensor
        self.keep: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.body(x.to(torch.bfloat16)).float())[:, self.order]
        hidden = hidden.masked_fill(~self.keep, 0.0)
        return (hidden.double() * self.island).sum(1).float().pow(2).mean()


class LogitScale(nn.Module):
    """A 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale.exp()).pow(2).mean()


class Unused(nn.Module):
    """A parameter that no branch uses, one that only the taken branch uses, one that only the other uses."""

    def __init__(self, wide: bool = True) -> None:
        super().__init__()
        self.wide = wide
        self.a, self.b, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.a if self.wide else self.b
        hidden: Tensor = layer(x)
        return hidden.pow(2).mean()


class ComplexFilter(nn.Module):
    """A filter in frequency space; its complex weight is stored as pairs of reals."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.linear(x)) * torch.view_as_complex(self.weight)
        return torch.fft.irfft(spectrum, n=8).pow(2).mean()


class ComplexParameter(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs().pow(2).mean()


def weight_norm() -> Case:
    return on_x(Squared(parametrizations.weight_norm(nn.Linear(8, 8))))


def spectral_norm() -> Case:
    return on_x(Squared(parametrizations.spectral_norm(nn.Linear(8, 8))))


def orthogonal() -> Case:
    return on_x(Squared(parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley")))


def old_weight_norm() -> Case:
    return on_x(Squared(nn.utils.weight_norm(nn.Linear(8, 8))))


def old_spectral_norm() -> Case:
    return on_x(Squared(nn.utils.spectral_norm(nn.Linear(8, 8))))


class Symmetric(nn.Module):
    """A parametrization of the user's own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def own_parametrization() -> Case:
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return on_x(Squared(layer))


class Squared(nn.Module):
    """Mean square of what a network computes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.network(x)
        return hidden.pow(2).mean()


def shared_module() -> Case:
    layer = nn.Linear(8, 8)
    return on_x(Squared(nn.Sequential(layer, nn.ReLU(), layer)))


def partly_frozen() -> Case:
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    network[0].weight.requires_grad_(False)
    return on_x(Squared(network))


def parameter_containers() -> Case:
    return on_x(ParameterContainers())


class ParameterContainers(nn.Module):
    """ParameterList and ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(8, 8) for _ in range(2)])
        self.named = nn.ParameterDict({"scale": torch.ones(8)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = (x @ weight).tanh()
        return (x * self.named["scale"]).pow(2).mean()


STATE: dict[str, Callable[[], Case]] = {
    "transposed_tie": lambda: on_x(Autoencoder()),
    "running_statistics": lambda: on_x(RunningStatistics()),
    "assigned_buffer": lambda: on_x(AssignedBuffer()),
    "mixed_dtypes": lambda: on_x(MixedDtypes()),
    "logit_scale": lambda: on_x(LogitScale()),
    "unused": lambda: on_x(Unused()),
    "complex_filter": lambda: on_x(ComplexFilter()),
    "complex_parameter": lambda: on_x(ComplexParameter()),
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "orthogonal": orthogonal,
    "old_weight_norm": old_weight_norm,
    "old_spectral_norm": old_spectral_norm,
    "own_parametrization": own_parametrization,
    "shared_module": shared_module,
    "partly_frozen": partly_frozen,
    "parameter_containers": parameter_containers,
}
