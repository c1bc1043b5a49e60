"""Random plans on a mesh of three axes, executed on eight simulated ranks, against the plain module."""

from __future__ import annotations

import random

import pytest
import torch

from autopar.layouts.placement import Mesh
from tests.passes.hand_plans import calls
from tests.passes.lowering.test_lower import Case, Mlp, gpt2, llama, random_plan

CUBE = Mesh(("dp_replicate", "dp_shard", "tp"), (2, 2, 2))


def test_random_plans_of_the_mlp_on_three_axes() -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(8, 6, dtype=torch.double), "y": torch.randn(8, 4, dtype=torch.double)}
    case = Case(Mlp().double(), inputs)
    for seed in range(4):
        plan = random_plan(case, CUBE, seed)
        names = random.Random(seed).sample(sorted(plan.operators), k=len(plan.operators) // 2)
        case.check(plan, recompute=names if seed % 2 else ())


@pytest.mark.exhaustive(sample="gpt2")
@pytest.mark.slow
@pytest.mark.parametrize("model", [gpt2, llama])
def test_random_plans_of_transformers_on_three_axes(model) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    ids = torch.randint(0, 30, (8, 8))
    case = Case(model(), {"input_ids": ids, "labels": ids})
    forward = [node.meta["operator"] for node in calls(case.program) if node.meta["phase"] == "forward"]
    recompute = random.Random(1).sample(forward, k=len(forward) // 2)
    errors, _ = case.errors(random_plan(case, CUBE, 1), recompute=recompute)
    assert max(errors.values()) < 1e-6, errors  # both models compute their loss in float32
