"""A mesh of four axes: its plan, run on sixteen simulated ranks, computes what the plain model computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.layouts.placement import Partial, Replicate, Shard
from autopar.plans.parallel_plan import Plan
from tests.passes.hand_plans import run_plan, tensors_of

SHAPE = (2, 2, 2, 2)


class Mlp(nn.Module):
    """forward(x (16, 32), y (16, 16)) -> mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.down(nn.functional.gelu(self.up(x))) - y).pow(2).mean()


@pytest.fixture(scope="module")
def case() -> tuple[nn.Module, dict[str, torch.Tensor], Plan]:
    torch.manual_seed(0)
    module = Mlp().double()
    inputs = {"x": torch.randn(16, 32, dtype=torch.double), "y": torch.randn(16, 16, dtype=torch.double)}
    plan = autopar.plan(
        module,
        inputs,
        cluster="2x8 H100-SXM",
        dims={"dp_replicate": 2, "dp_shard": 2, "tp": 2},
        constraints={"no_replicated_compute": True}, with_baselines=False,
    )
    return module, inputs, plan


def test_every_axis_of_four_does_something(case: tuple[nn.Module, dict[str, torch.Tensor], Plan]) -> None:
    plan = case[2]
    assert (plan.mesh.axis_names, plan.mesh.shape) == (("outer", "dp_replicate", "dp_shard", "tp"), SHAPE)
    layouts = [layout for operator in plan.operators.values() for layout in operator.outputs]
    assert all(any(layout[axis] != Replicate() for layout in layouts) for axis in range(len(SHAPE)))
    assert any(isinstance(layout[3], Shard | Partial) for layout in layouts)


def test_loss_and_gradients_are_those_of_the_plain_model(
    case: tuple[nn.Module, dict[str, torch.Tensor], Plan],
) -> None:
    module, inputs, plan = case
    program = capture(module, (), inputs)
    results = run_plan(program, plan, tensors_of(program, module, inputs))
    loss = module(**inputs)
    loss.backward()
    name = next(output.name for output in program.outputs if output.role == "loss")
    torch.testing.assert_close(results.outputs[name], loss.detach(), rtol=1e-9, atol=1e-12)
    for parameter, expected in module.named_parameters():
        torch.testing.assert_close(results.gradients[parameter], expected.grad, rtol=1e-9, atol=1e-12)
