"""A norm of a stage's gradients knows whose it is; all else of them is a plain DTensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate

from autopar._compat import lone_device_mesh
from autopar.errors import GradientError
from autopar.runtime.weights.stage_gradients import OF_A_PIPELINE, StageGradient, mark_gradients, of_stage


@pytest.fixture(scope="module")
def gradient() -> torch.Tensor:
    mesh = lone_device_mesh("cpu", ("one",))
    return of_stage(DTensor.from_local(torch.ones(4, 4), mesh, (TorchReplicate(),), run_check=False))


def test_norms_of_a_stage_are_not_joined(gradient: torch.Tensor) -> None:
    for norm in (torch.linalg.vector_norm(gradient), *torch._foreach_norm([gradient])):  # type: ignore[attr-defined]
        assert isinstance(norm, StageGradient)
        with pytest.raises(GradientError, match="counts all stages"):
            torch.stack([norm, norm])


def test_what_is_no_norm_is_a_plain_tensor(gradient: torch.Tensor) -> None:
    for other in (gradient * 2, torch.stack([gradient, gradient]), gradient.sum()):
        assert not isinstance(other, StageGradient)


class Watched(torch.optim.SGD):
    """What its steps meet."""

    met: type | None = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.met = type(self.param_groups[0]["params"][0].grad)
        super().step(closure)


def test_a_step_of_an_optimizer_meets_plain_tensors_and_leaves_gradients_of_stages(gradient: torch.Tensor) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros_like(gradient.plain))  # type: ignore[attr-defined]
    mark_gradients(model, OF_A_PIPELINE)
    optimizer = Watched(model.parameters(), lr=1.0)
    (model.weight * gradient.plain).sum().backward()  # type: ignore[attr-defined,operator]
    assert type(model.weight.grad) is StageGradient
    optimizer.step()
    assert optimizer.met is DTensor
    assert type(model.weight.grad) is StageGradient
    assert torch.equal(model.weight.detach().full_tensor(), -torch.ones(4, 4))  # type: ignore[operator]
