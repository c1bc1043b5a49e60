"""What one more GiB buys: the dual price of a plan's own solve beside solving again with a GiB more."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import autopar
from autopar.plans.next_gib import AT_MOST, DUAL_PRICE, GIB, NextGib, next_gib_of, next_gib_statistics
from autopar.plans.parallel_plan import Plan

DEPTH, ROWS, WIDTH = 12, 1 << 19, 256
SAVED = ROWS * WIDTH * 4
"""Half a GiB. Nothing is computed: pages of an empty tensor that nobody writes are none."""


class Chain(nn.Module):
    """forward(x (524288, 256)) -> mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


@cache
def planner() -> autopar.Planner:
    return autopar.Planner(Chain(), torch.empty(ROWS, WIDTH), cluster="1 H100-SXM", optimizer=torch.optim.AdamW)


@cache
def planned(gib: float) -> Plan:
    return planner().plan(memory_limit=f"{round(gib * GIB)}B", micro_batches=1)


def test_solving_again_with_a_gib_more_saves_no_more_than_the_multipliers_allow() -> None:
    plan, more = planned(5.5), planned(6.5)
    said = next_gib_of(plan)
    assert said is not None
    assert said.dual_seconds is not None
    assert said.at_most_seconds is not None
    saved = plan.objective_seconds - more.objective_seconds
    assert 0.0 < saved <= said.at_most_seconds * (1 + 1e-6)
    assert said.dual_seconds == pytest.approx(saved, rel=0.6)


def test_an_explanation_says_what_was_found_beside_the_dual_price() -> None:
    plan = planned(5.5)
    found = plan.explain("layers.3.0.weight").next_gib
    assert found is not None
    again = plan.objective_seconds - planned(6.5).objective_seconds
    assert found.found_seconds == pytest.approx(again, rel=0.25)
    for said in ("solved again", "dual price"):
        assert said in str(found)
    for said in ("memory ladder: ", "one GiB more"):
        assert said in plan.summary()


def test_a_plan_without_a_limit_that_binds_says_nothing() -> None:
    plan = planned(30.0)
    assert next_gib_of(plan) is None
    assert not plan.predicted.bytes_by_rung
    assert plan.explain("layers.3.0.weight").next_gib is None


def test_more_than_memory_without_a_limit_is_never_promised() -> None:
    said = next_gib_statistics(objective=10.0, proven_bound=9.5, seconds_per_byte=4.0 / GIB, free_bound=8.0)
    assert said == {DUAL_PRICE: 2.0, AT_MOST: 2.0}
    small = next_gib_statistics(objective=10.0, proven_bound=9.5, seconds_per_byte=1.0 / GIB, free_bound=8.0)
    assert small == {DUAL_PRICE: 1.0, AT_MOST: 1.5}
    assert "per device: about 1 s less" in str(NextGib(dual_seconds=1.0, at_most_seconds=1.5))
