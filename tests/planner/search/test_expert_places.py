"""Experts are placed by load where rows travel and the step is shorter; the plan says where, and keeps saying it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import autopar
from autopar.explain.origin import Remembered
from autopar.explain.recovered import query_of
from autopar.plans.expert_placement import busiest_share
from autopar.plans.parallel_plan import Plan
from autopar.plans.parallelism import expert_ranks
from tests.planner.search.test_expert_ways import Many

SKEWED: dict[str, Any] = {"mode": "fast", "dims": {"ep": 8}, "ep": "dispatch", "expert_load": "zipf:0.8"}


@pytest.fixture(scope="module")
def planner() -> autopar.Planner:
    return autopar.Planner(Many(), (torch.randn(64, 64, 64),), cluster="2x4 cpu @ 1Gb", optimizer=torch.optim.SGD)


@pytest.fixture(scope="module")
def placed(planner: autopar.Planner) -> Plan:
    return planner.plan(**SKEWED, replicated_experts=0)


def test_the_busiest_rank_gets_fewer_rows_and_the_step_is_shorter(planner: autopar.Planner, placed: Plan) -> None:
    shares, order = placed.expert_load[""], placed.expert_order[""]
    assert busiest_share(shares, order, 8) < 0.55 * busiest_share(shares, range(32), 8)
    stay = query_of(placed.origin.source, placed.with_(expert_order={}))  # type: ignore[union-attr]
    assert stay.expert_order == {}
    blind = planner.plan(**{**SKEWED, "expert_load": None})
    assert blind.expert_order == {}
    (note,) = (note for note in placed.notes if "placed by load" in note)
    said = re.search(r"busiest rank gets ([\d.]+)%, in the model's order ([\d.]+)%, in any at least ([\d.]+)%", note)
    assert said
    now, before, least = map(float, said.groups())
    assert least <= now < before
    assert "experts of the model on the ranks of their group: " in placed.summary()


def test_hops_are_as_even_as_ranks_and_other_loads_give_other_orders(planner: autopar.Planner, placed: Plan) -> None:
    near = planner.plan(**{**SKEWED, "ep": "two_level"}, replicated_experts=0)
    shares = near.expert_load[""]
    assert expert_ranks(near, "") == (2, 4)
    assert busiest_share(shares, near.expert_order[""], 2) < 0.51
    turned = placed.what_if(expert_load={"": shares[::-1]})
    assert turned.expert_order[""] != placed.expert_order[""]
    assert turned.predicted.step_seconds == pytest.approx(placed.predicted.step_seconds, rel=0.02)
    assert placed.what_if(expert_load={"": [1] * 32}).expert_order == {}


def test_copies_are_placed_beside_the_others(planner: autopar.Planner, placed: Plan) -> None:
    both = planner.plan(**SKEWED)
    assert both.replicated_experts
    assert both.expert_order
    assert both.predicted.step_seconds < placed.predicted.step_seconds


def test_a_plan_from_a_file_is_asked_as_it_lies(planner: autopar.Planner, placed: Plan) -> None:
    again = planner.bind(Plan.from_json(placed.to_json()), **SKEWED, replicated_experts=0)
    assert again.expert_order == placed.expert_order
    assert isinstance(again.origin, Remembered)
    assert query_of(again.origin.source, again).expert_order == placed.expert_order
    product = next(name for name in again.operators if "expert_linear#0" in name)
    assert str(again.explain(product)) == str(placed.explain(product))
    assert again.edit({"up": placed.parameters["up"].stored and "S(0)"}).expert_order == placed.expert_order
    assert "experts in the order" in placed.diff(placed.with_(expert_order={}))
