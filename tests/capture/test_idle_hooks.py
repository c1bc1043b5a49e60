"""A forward hook that gives nothing back is named in the log; one that computes is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture


def test_hooks_that_give_nothing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def collect(module: nn.Module, args: object, output: torch.Tensor) -> None:
        """Gives nothing."""

    def double(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(collect)
    model[1].register_forward_hook(double)
    before = [dict(module._forward_hooks) for module in model]
    capture(model, (torch.randn(2, 4),))
    messages = [record.getMessage() for record in caplog.records if "gives nothing back" in record.getMessage()]
    assert len(messages) == 1
    assert "collect of 0 gives nothing back: compiled calls do not run it" in messages[0]
    assert [dict(module._forward_hooks) for module in model] == before
