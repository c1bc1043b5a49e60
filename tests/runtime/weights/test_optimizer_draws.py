"""An optimizer that rounds at random draws the same on every rank, and leaves torch's generator as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.runtime.weights import optimizer_draws
from autopar.runtime.weights.optimizer_draws import OptimizerDraws


class Drawing(torch.optim.SGD):
    """An optimizer that keeps what it draws."""

    bf16_stochastic_round = True

    def step(self, closure: Any = None) -> Any:
        self.drawn = torch.rand(3)


def draws(seed: int, state: int, kind: type[torch.optim.SGD] = Drawing) -> list[list[float]]:
    """What two steps draw, and what is drawn behind them. seed: of the module; state: of torch's generator."""
    model = nn.Linear(2, 2)
    OptimizerDraws(model.parameters(), seed)
    optimizer: Any = kind(model.parameters(), lr=0.1)
    torch.manual_seed(state)
    found = []
    for _ in range(2):
        optimizer.step()
        found.append(optimizer.drawn.tolist())
    return [*found, torch.rand(3).tolist()]


def test_draws_are_those_of_the_module_and_the_step() -> None:
    one, other, third = draws(7, 0), draws(7, 1), draws(8, 0)
    torch.manual_seed(0)
    assert one[:2] == other[:2]
    assert one[0] not in (one[1], third[0])
    assert one[2] == torch.rand(3).tolist() != other[2]


def test_without_them_ranks_draw_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_draws, "draws_at_random", lambda _: False)
    assert draws(7, 0)[0] != draws(7, 1)[0]


def test_others_draw_as_they_did() -> None:
    class Usual(Drawing):
        bf16_stochastic_round = False

    torch.manual_seed(0)
    assert [torch.rand(3).tolist() for _ in range(3)] == draws(7, 0, Usual)
