"""The check of loss and gradients catches what it must catch."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from benchmarks.agreement import compare, reference
from benchmarks.zoo.registry import zoo_model


class Faulty(nn.Module):
    """A model whose loss, or the gradient of one parameter, is off by `factor`."""

    def __init__(self, model: nn.Module, *, loss: float = 1.0, gradient: float = 1.0) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        next(model.parameters()).register_hook(lambda g: g * gradient)

    def forward(self, **inputs: Tensor) -> Tensor:
        output = self.model(**inputs)
        return self.loss * (output if isinstance(output, Tensor) else output.loss)

    def named_parameters(self, *args: object, **kwargs: object):  # type: ignore[no-untyped-def,override]
        return self.model.named_parameters()


def test_the_plain_model_agrees_with_itself() -> None:
    model, inputs = zoo_model("gpt2")
    assert compare(copy.deepcopy(model), inputs, reference(model, inputs)).agrees


def test_a_wrong_loss_disagrees() -> None:
    model, inputs = zoo_model("encoder")
    found = compare(Faulty(copy.deepcopy(model), loss=1.001), inputs, reference(model, inputs))
    assert not found.agrees
    assert found.loss_error > 5e-4


def test_one_gradient_off_by_a_ten_thousandth_disagrees_and_is_named() -> None:
    model, inputs = zoo_model("encoder")
    found = compare(Faulty(copy.deepcopy(model), gradient=1.0001), inputs, reference(model, inputs))
    assert not found.agrees
    assert found.worst_parameter == next(name for name, _ in model.named_parameters())


def test_a_gradient_whose_true_value_is_zero_is_measured_against_the_largest() -> None:
    model, inputs = zoo_model("bert")
    expected = reference(model, inputs)
    key_biases = [name for name in expected.gradients if name.endswith("key.bias")]
    assert key_biases
    assert all(expected.allowed[name] < 1e-3 for name in key_biases)
    assert torch.isfinite(expected.loss)


class OverflowsInDouble(nn.Module):
    """A model whose gradient is infinite in fp64 only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.finfo(torch.float64).max * 10 if x.dtype == torch.float64 else 1.0
        return (self.weight * x * factor).sum()


def test_a_model_that_only_overflows_in_double_precision_is_compared_in_its_own() -> None:
    model, inputs = OverflowsInDouble(), {"x": torch.ones(3)}
    expected = reference(model, inputs)
    assert compare(copy.deepcopy(model), inputs, expected).agrees
    assert not compare(Faulty(copy.deepcopy(model), gradient=1.001), inputs, expected).agrees
