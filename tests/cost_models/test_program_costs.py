"""Prices of lowered programs: every value has a shape, also those between the operators of the captured graph."""

from __future__ import annotations

from typing import Any

import torch

import autopar


def test_intermediates_of_which_the_lowering_says_nothing_have_a_price() -> None:
    """A convolution with split input channels adds its bias on one rank; the block of the bias is such a value."""
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 4, 3))
    options: dict[str, Any] = {"dims": {"tp": 2}, "loss_fn": lambda output, _: output.pow(2).mean(), "mode": "fast"}
    plan = autopar.plan(model, torch.randn(4, 4, 8, 8), cluster="2 cpu", **options)
    assert plan.operators["2/convolution#0"].axes == ("ci",)
    assert plan.predicted.step_seconds > 0
