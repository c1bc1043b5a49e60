"""What the optimizer of a program holds: a state for every parameter that it updates."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture import capture
from autopar.cost_models.operator_costs import OPTIMIZER, SGD
from autopar.planner.problem.optimizer_states import state_bytes


class Idle(nn.Module):
    """One weight that the loss reads, one that is frozen, one that forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.frozen, self.idle = (nn.Parameter(torch.ones(8)) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.read * self.frozen).sum() if self.training else (x * self.idle).sum()


def test_a_parameter_without_a_gradient_has_no_state() -> None:
    found = state_bytes(capture(Idle(), (torch.ones(8),)), torch.optim.AdamW, "cuda")
    assert {name: bool(state.optimizer) for name, state in found.items()} == {
        "read": True, "frozen": False, "idle": False
    }  # fmt: skip
    assert found["idle"].gradient == found["idle"].step_traffic == found["idle"].update == 0.0


def test_an_update_is_priced_by_the_curve_of_its_optimizer() -> None:
    program = capture(Idle(), (torch.ones(8),))
    asked = {torch.optim.SGD: SGD, torch.optim.AdamW: OPTIMIZER, None: OPTIMIZER}
    assert {key: state_bytes(program, key)["read"].step_curve for key in asked} == asked
