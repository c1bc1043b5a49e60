"""The check of loss and gradients catches what it must catch."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.agreement import compare, evident_reference, reference
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


class Cancels(nn.Module):
    """A product of which fp32 keeps about three digits: it is added to a large number, which is taken off again."""

    def __init__(self, large: float) -> None:
        super().__init__()
        self.large = large
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.weight + self.large) - self.large).square().mean()


def test_what_rounding_hides_is_no_evidence_and_is_compared_in_fp64() -> None:
    model, inputs = Cancels(1e5), {"x": torch.randn(4, 8)}
    expected = reference(model, inputs)
    assert not expected.is_evidence
    assert compare(copy.deepcopy(model), inputs, expected).verdict == "no evidence"
    assert compare(Faulty(copy.deepcopy(model), gradient=1.0001), inputs, expected).verdict == "no evidence"
    assert compare(Faulty(copy.deepcopy(model), gradient=2.0), inputs, expected).verdict == "disagrees"
    exact, doubled, expected = evident_reference(model, inputs)
    assert expected.is_evidence
    assert compare(copy.deepcopy(exact), doubled, expected).verdict == "agrees"
    assert compare(Faulty(copy.deepcopy(exact), gradient=1.0001), doubled, expected).verdict == "disagrees"


def test_evidence_stays_in_its_own_precision() -> None:
    model, inputs = Cancels(0.0), {"x": torch.randn(4, 8)}
    same, same_inputs, expected = evident_reference(model, inputs)
    assert same is model
    assert same_inputs["x"] is inputs["x"]
    assert expected.is_evidence
    assert not replace(expected, allowed={**expected.allowed, "weight": 1.01e-3}).is_evidence
    assert not replace(expected, allowed={**expected.allowed, "": 1.01e-3}).is_evidence
    assert replace(expected, allowed={**expected.allowed, "": 1e-3}).is_evidence


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
