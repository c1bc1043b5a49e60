"""While a profiler runs, operators stand in its trace under the names of the plan; without one nothing is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.kernels import named_calls

pytestmark = pytest.mark.usefixtures("shared_captures")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def names_of_a_step(module: nn.Module, x: torch.Tensor) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        module(x=x).backward()
    return {event.key for event in profiler.key_averages()}


def test_operators_of_forward_and_backward_are_named_and_compute_the_same() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(6, 8)
    loss = model(x)
    loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    module = autopar.compile(model, {"x": x})
    found = names_of_a_step(module, x)
    inside_of_additions = {"up/mm#0", "down/mm#0"}  # x @ w + b is one call, under the name of the addition
    assert set(module.plan.operators) - found == inside_of_additions
    assert not {"x", "up.weight"} & found
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_without_a_profiler_no_name_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_calls, "with_names", None)  # calling it fails
    x = torch.randn(6, 8)
    autopar.compile(Model(), {"x": x})(x=x).backward()


def test_a_compiled_piece_is_called_by_its_first_and_last_operator() -> None:
    x = torch.randn(6, 8)
    plan = autopar.compile(Model(), {"x": x}).plan.with_(kernel_backend="inductor")
    module = autopar.compile(Model(), {"x": x}, plan=plan)
    module(x=x).backward()
    assert any(" ... " in key and "/" in key for key in names_of_a_step(module, x))
