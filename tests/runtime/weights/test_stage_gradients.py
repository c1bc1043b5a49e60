"""A norm of a stage's gradients knows whose it is; all else of them is a plain DTensor."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate

from autopar._compat import lone_device_mesh
from autopar.errors import GradientError
from autopar.runtime.weights.stage_gradients import StageGradient, of_stage


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
