"""The storages of a real training step live as long as the plan says, and no longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.step import whole_step
from benchmarks.storages import StorageTracker


class Classifier(nn.Module):
    """Returns the logits beside the loss, as models of transformers do: nothing differentiates them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
        self.head = nn.Linear(64, 512)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _peaks() -> tuple[float, float]:
    """(predicted, measured) peak of forward and backward in bytes."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(256, 64), "labels": torch.randint(0, 512, (256,))}
    module = autopar.compile(Classifier(), inputs, optimizer=torch.optim.SGD)
    module(**inputs)["loss"].backward()
    module.zero_grad()
    with StorageTracker([*module.parameters(), *inputs.values()]) as tracker:
        result = module(**inputs)
        result["loss"].backward()
    return module.plan.predicted.peak_bytes, tracker.peak_bytes


def test_a_step_holds_what_was_predicted() -> None:
    predicted, measured = _peaks()
    assert measured == pytest.approx(predicted, rel=0.01)


def test_saved_values_that_outlive_their_readers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = whole_step._saved
    kept: list[Any] = []

    def keeping(ctx: Any) -> list[Any]:
        kept.append(original(ctx))
        return list(kept[-1])

    monkeypatch.setattr(whole_step, "_saved", keeping)
    predicted, measured = _peaks()
    assert measured > 1.05 * predicted
