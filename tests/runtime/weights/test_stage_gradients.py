"""A norm of a stage's gradients knows whose it is; all else of them is a plain DTensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import GradientError
from autopar.runtime.weights.stage_gradients import StageGradient, of_stage


@pytest.fixture(scope="module")
def gradient() -> torch.Tensor:
    module = autopar.compile(nn.Linear(4, 4), torch.ones(2, 4), loss_fn=lambda output, batch: output.square().mean())
    module(torch.ones(2, 4))
    return of_stage(module.get_parameter("weight").detach().clone())


def test_norms_of_a_stage_are_not_joined(gradient: torch.Tensor) -> None:
    for norm in (torch.linalg.vector_norm(gradient), *torch._foreach_norm([gradient])):  # type: ignore[attr-defined]
        assert isinstance(norm, StageGradient)
        with pytest.raises(GradientError, match="counts all stages"):
            torch.stack([norm, norm])


def test_what_is_no_norm_is_a_plain_tensor(gradient: torch.Tensor) -> None:
    for other in (gradient * 2, torch.stack([gradient, gradient]), gradient.sum()):
        assert not isinstance(other, StageGradient)
