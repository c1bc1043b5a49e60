"""A call in eval mode has the gradients of the plain model in eval mode, or says why not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import GradientError


class Scorer(nn.Module):
    """forward(x (B, 6), labels (B,)) -> loss; a norm with running statistics, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.scale = 1.0

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = F.dropout(self.norm(self.up(x)), 0.5, self.training) * self.scale
        return F.cross_entropy(self.head(hidden), labels)


def batch(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {"x": torch.randn(4, 6), "labels": torch.tensor([0, 1, 2, 1])}


def compiled() -> tuple[autopar.ParallelModule, nn.Module]:
    """In eval mode, and the plain model."""
    plain = Scorer().eval()
    return autopar.compile(copy.deepcopy(plain), batch(), mode="fast"), plain


def expect_gradients(module: nn.Module, plain: nn.Module) -> None:
    for name, parameter in plain.named_parameters():
        found, wanted = module.get_parameter(name).grad, parameter.grad
        assert found is not None, name
        assert wanted is not None, name
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_calls_in_eval_mode_have_gradients() -> None:
    module, plain = compiled()
    for seed in range(3):  # the first runs again in backward, the others keep what theirs needs
        module.zero_grad()
        plain.zero_grad()
        loss, wanted = module(**batch(seed)), plain(**batch(seed))
        torch.testing.assert_close(loss, wanted)
        (2.0 * loss).backward()
        (2.0 * wanted).backward()
        expect_gradients(module, plain)
    assert torch.equal(module.get_buffer("norm.running_mean"), plain.get_buffer("norm.running_mean"))


def test_two_calls_before_one_backward() -> None:
    module, plain = compiled()
    (module(**batch(1)) + module(**batch(2))).backward()
    (plain(**batch(1)) + plain(**batch(2))).backward()
    expect_gradients(module, plain)


def test_nothing_is_kept_without_gradients() -> None:
    module, _ = compiled()
    with torch.no_grad():
        assert not module(**batch()).requires_grad
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    assert not module(**batch()).requires_grad


@pytest.mark.parametrize("change", ["mode", "state", "weight", "frozen"])
def test_what_changed_since_the_call_is_named(change: str) -> None:
    module, _ = compiled()
    loss = module(**batch())
    if change == "mode":
        module.train()
    elif change == "state":
        module.scale = 2.0
    elif change == "frozen":
        module.get_parameter("up.weight").requires_grad_(False)
    else:
        with torch.no_grad():
            module.get_parameter("up.weight").mul_(2.0)
    words = r"up.weight changed between forward and backward" if change == "weight" else r"module.train\(\)"
    with pytest.raises(GradientError, match=words):
        loss.backward()
