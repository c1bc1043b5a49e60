"""Where one plan computes an operator again and the other saves its result, the comparison says so of the first."""

from __future__ import annotations

import torch

import autopar
from autopar.explain.answers import Comparison
from autopar.plans.plan_text import without_numbers
from tests.explain.test_stages import INPUTS, Blocks


def test_the_plan_that_computes_again_is_the_one_said_to() -> None:
    planner = autopar.Planner(Blocks(), INPUTS, cluster="2 H100-SXM", optimizer=torch.optim.AdamW)
    dims = {"dp_replicate": 2}
    saving, again = (planner.plan(dims=dims, mode="fast", recompute=kind) for kind in ("none", "full"))
    repeated = {without_numbers(name) for name, operator in again.operators.items() if operator.recompute}
    assert repeated
    found = again.explain(vs=saving)
    assert isinstance(found, Comparison)
    parted = {each.pattern: each.choices for each in found.differences if each.choices is not None}
    assert repeated & set(parted)
    for name, (this, other) in parted.items():
        assert ("computed again" in this, "computed again" in other) == (name in repeated, False)
