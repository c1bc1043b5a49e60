"""Gradients are returned in a dtype of their own, so that ranks add them up in it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.capture import trace as capture_trace
from autopar.program import Program


class Scored(nn.Module):
    """Two layers, one of which is frozen, and the mean of squares."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.second.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.second(torch.relu(self.first(x))).square().mean()
        return loss


def gradient_dtypes(program: Program) -> set[torch.dtype]:
    pairs = zip(program.returned, program.outputs, strict=True)
    return {node.meta["val"].dtype for node, output in pairs if output.role == "gradient" and node is not None}


@pytest.mark.parametrize(
    ("dtype", "precision", "reduce_dtype", "expected"),
    [
        (torch.bfloat16, None, None, torch.bfloat16),
        (torch.bfloat16, None, "fp32", torch.float32),
        (torch.float32, "bf16", None, torch.float32),
        (torch.float32, "bf16", "bf16", torch.bfloat16),
        (torch.float32, "fp16", None, torch.float32),
        (torch.float32, None, "fp32", torch.float32),
    ],
)
def test_every_gradient_has_the_dtype(
    dtype: torch.dtype, precision: str | None, reduce_dtype: str | None, expected: torch.dtype
) -> None:
    model = Scored().to(dtype)
    found = capture(model, (torch.randn(4, 8, dtype=dtype),), precision=precision, reduce_dtype=reduce_dtype)
    assert gradient_dtypes(found) == {expected}


def test_a_gradient_of_an_input_stays_what_it_is() -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    found = capture(Scored().to(torch.bfloat16), (x,), reduce_dtype="fp32")
    assert gradient_dtypes(found) == {torch.float32, torch.bfloat16}


def planned(reduce_dtype: str | None) -> autopar.Plan:
    """On a network that is slow beside the layers."""
    model, x = Scored(512).to(torch.bfloat16), torch.randn(4, 512, dtype=torch.bfloat16)
    slow, dims = "2x1 A100-80 @ 1Gb", {"dp_replicate": 2}
    return autopar.plan(model, x, cluster=slow, dims=dims, mode="fast", reduce_dtype=reduce_dtype, with_baselines=False)


def test_sums_in_fp32_are_priced_at_twice_the_bytes() -> None:
    narrow, wide = planned(None), planned("fp32")
    assert 1.8 < wide.objective_seconds / narrow.objective_seconds < 2.1
    assert (narrow.reduce_dtype, wide.reduce_dtype) == (None, "fp32")
    assert autopar.Plan.from_json(wide.to_json()).reduce_dtype == "fp32"


def test_gradients_reach_parameters_in_their_dtype_and_are_those_of_one_cast() -> None:
    """On one process; micro-batches are added in fp32, where bf16 loses digits."""
    torch.manual_seed(0)
    model, x = Scored().to(torch.bfloat16), torch.randn(64, 8, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).double()
    exact(x.double()).backward()
    errors = {}
    for reduce_dtype in (None, "fp32"):
        module = autopar.compile(copy.deepcopy(model), x, micro_batches=16, reduce_dtype=reduce_dtype, mode="fast")
        module(x).backward()
        weight = module.get_parameter("first.weight")
        assert weight.grad is not None
        assert weight.grad.dtype == torch.bfloat16
        true = exact.first.weight.grad
        errors[reduce_dtype] = float((weight.grad.double() - true).norm() / true.norm())
    assert errors["fp32"] < 0.8 * errors[None], errors


def test_the_name_is_checked_before_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_trace, "_trace", None)
    with pytest.raises(autopar.ConfigurationError, match=r'reduce_dtype=.float32. is unknown.*did you mean .*fp32'):
        planned("float32")
