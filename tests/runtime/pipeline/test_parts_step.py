"""A step in parts on one process; `tests/distributed` has stages and several ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.pipeline.parts_step import PartsStep
from autopar.runtime.step.whole_step import WholeStep


class Labelled(nn.Module):
    """A mean over the samples that have a label, so that a part alone does not know what to divide by."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.tensor([1, -100, -100, -100, 4, 0, 2, 3])
    return {"x": torch.randn(8, 6), "labels": labels}


@pytest.mark.parametrize(("parts", "kind"), [(1, WholeStep), (2, PartsStep), (4, PartsStep)])
def test_parts_compute_what_the_whole_computes(parts: int, kind: type, inputs: dict[str, torch.Tensor]) -> None:
    model = Labelled()
    plain = copy.deepcopy(model)
    module = autopar.compile(model, inputs, micro_batches=parts)
    assert isinstance(module.step_for((), inputs)[0], kind)
    found, expected = module(**inputs), plain(**inputs)
    found["loss"].backward()
    expected["loss"].backward()
    torch.testing.assert_close(found["loss"], expected["loss"])
    torch.testing.assert_close(module.full(found["logits"]), expected["logits"])
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(module.full(module.get_parameter(name).grad), parameter.grad)


def test_a_frozen_model_runs_in_parts(inputs: dict[str, torch.Tensor]) -> None:
    model = Labelled().requires_grad_(False)
    module = autopar.compile(copy.deepcopy(model), inputs, micro_batches=2)
    torch.testing.assert_close(module(**inputs)["loss"].detach(), model(**inputs)["loss"])


def test_gradients_are_handed_out_once(inputs: dict[str, torch.Tensor]) -> None:
    loss = autopar.compile(Labelled(), inputs, micro_batches=2)(**inputs)["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out already"):
        loss.backward()
