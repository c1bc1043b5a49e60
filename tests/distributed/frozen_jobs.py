"""Jobs of the workers that train adapters beside frozen weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.captured_once import capture_once, compile_once, prepared_by
from tests.distributed.training_jobs import largest_error


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank update beside it."""

    def __init__(self, width_in: int, width_out: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(width_in, width_out).requires_grad_(False)
        self.down = nn.Linear(width_in, rank, bias=False)
        self.up = nn.Linear(rank, width_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class AdaptedModel(nn.Module):
    """forward(x (B, 32), y (B,)) -> cross entropy of two adapted layers over 16 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Adapted(32, 128)
        self.second = Adapted(128, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.second(torch.relu(self.first(x))), y)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a few steps beside the plain model showed."""

    gradient_error: float
    loss_error: float
    frozen_without_gradient: bool
    frozen_unchanged: bool


def adapted_batch() -> tuple[Tensor, Tensor]:
    """(x (8, 32), y (8,)), the same for every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 32, generator=generator), torch.randint(0, 16, (8,), generator=generator)


def captured(**_: Any) -> bool:
    """Capture the adapted model."""
    return capture_once("adapted", AdaptedModel(), adapted_batch())


@prepared_by(captured)
def train_adapters(dims: dict[str, int]) -> Trained:
    """Two AdamW steps of the adapters under one plan and in the plain model."""
    torch.manual_seed(0)
    model = AdaptedModel()
    reference = copy.deepcopy(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    x, y = adapted_batch()
    module = compile_once("adapted", model, (x, y), dims=dims, optimizer=torch.optim.AdamW)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (module, reference)
    ]
    for step in range(2):
        loss, plain = module(x, y), reference(x, y)
        loss.backward()
        plain.backward()
        if step == 0:
            error = largest_error(module, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    frozen = {name: module.get_parameter(name) for name in before}
    return Trained(
        gradient_error=error,
        loss_error=abs(float(loss.detach()) - float(plain.detach())),
        frozen_without_gradient=all(p.grad is None and not p.requires_grad for p in frozen.values()),
        frozen_unchanged=all(
            isinstance(p, DTensor) and torch.equal(p.full_tensor(), before[name]) for name, p in frozen.items()
        ),
    )
