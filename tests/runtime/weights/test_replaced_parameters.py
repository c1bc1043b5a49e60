"""An optimizer from before compile trains nothing, and says so at its first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.weights import shard_model

BATCH = torch.ones(2, 4)


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> autopar.ParallelModule:
    return autopar.compile(
        model, BATCH, loss_fn=lambda output, batch: output.square().mean(), optimizer=optimizer, mode="fast"
    )


def test_an_optimizer_that_was_not_handed_over_is_refused_at_its_first_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module = compiled(model)
    module(BATCH).backward()
    words = r"4 of the 4 parameters of this SGD .*\(0.weight, .*optimizer="
    with pytest.raises(autopar.ConfigurationError, match=words):
        optimizer.step()


def test_without_the_guard_it_trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_model, "mark_replaced", lambda _: None)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module = compiled(model)
    before = module.get_parameter("weight").detach().clone()
    module(BATCH).backward()
    optimizer.step()
    assert torch.equal(module.get_parameter("weight"), before)


@pytest.mark.parametrize("when", ["before, handed over", "behind"])
def test_others_train(when: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if when != "behind" else None
    module = compiled(model, optimizer)
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    before = module.get_parameter("weight").detach().clone()
    module(BATCH).backward()
    optimizer.step()
    assert not torch.equal(module.get_parameter("weight"), before)


@pytest.mark.parametrize("use", ["zero_grad", "clip", "read"])
def test_the_gradient_of_a_replaced_parameter_is_an_error(use: str) -> None:
    model = nn.Linear(4, 4)
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.1)
    compiled(model)(BATCH).backward()
    uses = {
        "zero_grad": optimizer.zero_grad,
        "clip": lambda: nn.utils.clip_grad_norm_(weights, 1.0),  # it would find no gradient, and clip nothing
        "read": lambda: weights[0].grad,
    }
    with pytest.raises(autopar.ConfigurationError, match=r"weight .*module.parameters\(\).*optimizer="):
        uses[use]()
    assert weights[0].isfinite().all()  # its values are there
