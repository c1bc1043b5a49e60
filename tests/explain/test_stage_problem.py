"""Every stage of a plan is found to recompute as it does, whatever its neighbours do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.explain.origin import Remembered
from autopar.explain.stage_problem import stage_problem
from autopar.plans.parallel_plan import Plan
from tests.explain.test_stages import INPUTS, Blocks


@pytest.fixture(scope="module")
def planner() -> autopar.Planner:
    return autopar.Planner(Blocks(), INPUTS, cluster="2 H100-SXM", optimizer=torch.optim.AdamW)


@pytest.fixture(scope="module")
def plan(planner: autopar.Planner) -> Plan:
    return planner.plan(dims={"pp": 2}, micro_batches=4, schedule="1f1b", recompute="full", mode="fast")


@pytest.mark.parametrize("expected", [("full", "none"), ("none", "full"), ("full", "full"), ("none", "none")])
def test_the_way_of_recomputation_is_read_stage_by_stage(plan: Plan, expected: tuple[str, str]) -> None:
    assert isinstance(plan.origin, Remembered)
    problem = stage_problem(plan.origin.source, plan)
    order = [str(node.meta["operator"]) for node in problem.lifetimes.in_order if node.meta["phase"] != "backward"]
    cut = plan.staged.stages[0].last_operator
    assert cut is not None
    first = set(order[: order.index(cut) + 1])
    operators = {
        name: replace(each, recompute=each.recompute and expected[name not in first] == "full")
        for name, each in plan.operators.items()
    }
    edited = replace(plan, operators=operators)
    assert problem.modes(edited, problem.solved(edited, problem.recovered(edited).labels)) == expected
