"""A plan is run only where every name in it is one of the model's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanMismatchError


def test_a_plan_that_names_what_the_model_lacks_is_refused_with_the_nearest_name() -> None:
    """An entry beside the right ones would do nothing, and nobody would see it."""
    model, inputs = nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4),)
    plan = autopar.compile(model, inputs, mode="fast").plan
    stray = plan.with_(operators={**plan.operators, "1/mm#0": next(iter(plan.operators.values()))})
    with pytest.raises(PlanMismatchError, match=r"operators\.1/mm#0: the model has no such operator; nearest"):
        autopar.compile(model, inputs, plan=stray)
