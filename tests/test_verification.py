"""Where rounding allows so much that agreement proves nothing, verify says so instead of agreeing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import VerificationError
from autopar.verification import Verification


class Cancels(nn.Module):
    """A product of which fp32 keeps two digits: it is added to a large number, which is taken off again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.weight + 1e5) - 1e5).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_that_rounds_too_much_is_verified_in_fp64_only(dtype: torch.dtype) -> None:
    x = torch.randn(4, 8, dtype=dtype)
    module = autopar.compile(Cancels().to(dtype), (x,), mode="fast")
    if dtype == torch.float64:
        assert max(autopar.verify(module, (x,)).limits.values()) <= 1e-3
    else:
        with pytest.raises(VerificationError, match=r"no evidence: .* proves nothing; verify a copy"):
            autopar.verify(module, (x,))


@pytest.mark.parametrize(
    ("errors", "worst"),
    [
        ({"up": 1e-6, "down": 3e-6}, "down"),
        ({"up": 2e-6, "wide": 4e-6}, "up"),  # 2 against 0.4 of its limit
        ({"up": 1.0, "down": float("nan")}, "down"),
        ({}, ""),
    ],
)
def test_the_worst_gradient_is_furthest_from_its_limit(errors: dict[str, float], worst: str) -> None:
    limits = {"up": 1e-6, "down": 1e-6, "wide": 1e-5}
    found = Verification(loss=1.0, reference_loss=1.0, loss_limit=1e-6, gradients=errors, limits=limits)
    assert found.worst == worst
