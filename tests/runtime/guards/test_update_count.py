"""Updates that an optimizer makes between two calls."""

from __future__ import annotations

import torch
from torch import nn

from autopar.runtime.guards.update_count import NOTHING_TO_UPDATE, UpdateCount


def test_steps_between_two_calls_count_once() -> None:
    model = nn.Linear(2, 2)
    count = UpdateCount(model.parameters())
    weight, bias = torch.optim.SGD([model.weight], lr=1.0), torch.optim.SGD([model.bias], lr=1.0)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    assert count.read() == 0
    weight.step()
    bias.step()
    assert count.read() == 1
    other.step()
    assert count.read() == 1
    bias.step()
    assert count.read() == 2


def test_a_scaler_that_skips_a_step_makes_none() -> None:
    model = nn.Linear(2, 2)
    count = UpdateCount(model.parameters())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu")
    for factor, expected in ((float("inf"), 0), (1.0, 1)):
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert count.read() == expected
        optimizer.zero_grad()


def test_a_frozen_rank_has_nothing_to_update() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert UpdateCount(frozen.parameters()).read() == NOTHING_TO_UPDATE
