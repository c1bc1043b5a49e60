"""A factor and its way go together, as asked and in plan files."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from autopar.errors import ConfigurationError
from autopar.plans.capacity_factor import check_expert_capacity
from autopar.plans.parallel_plan import Plan
from tests.plans.test_plan_text import small_plan

ASKED: dict[str, object] = {"ep": "capacity", "expert_capacity": 1.25}


@pytest.mark.parametrize("factor", [0, -1.25, math.nan, math.inf, "1.25", True, [1.25], 1 << 30])
def test_what_is_no_factor_is_refused(factor: Any) -> None:
    with pytest.raises(ConfigurationError, match="write a number above 0"):
        check_expert_capacity("capacity", factor)


@pytest.mark.parametrize("ep", ["dispatch", None])
def test_a_factor_is_of_one_way(ep: str | None) -> None:
    with pytest.raises(ConfigurationError, match=r"drops rows, which ep=.* does not"):
        check_expert_capacity(ep, 2)
    with pytest.raises(ConfigurationError, match="needs expert_capacity"):
        check_expert_capacity("capacity", None)
    check_expert_capacity(ep, None)
    check_expert_capacity("capacity", 2)


def file_of(question: dict[str, object], **entries: object) -> bytes:
    document = json.loads(small_plan().to_json())
    return json.dumps({**document, **entries, "question": question}).encode()


def test_a_plan_keeps_its_factor() -> None:
    plan = Plan.from_json(file_of(ASKED))
    assert plan.expert_capacity == 1.25
    assert Plan.from_json(plan.to_json()).expert_capacity == 1.25
    assert Plan.from_json(file_of({})).expert_capacity is None


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"ep": "capacity", "expert_capacity": "much"}, "expert_capacity='much': write a number above 0"),
        ({"ep": "capacity", "expert_capacity": 0.0}, "write a number above 0"),
        ({"ep": "capacity"}, "needs expert_capacity"),
        ({"ep": "dispatch", "expert_capacity": 1.25}, "drops rows, which ep='dispatch' does not"),
    ],
)
def test_a_file_that_says_something_else_is_refused(question: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Plan.from_json(file_of(question))


def test_a_file_has_copies_of_experts_or_a_capacity() -> None:
    with pytest.raises(ConfigurationError, match=r"replicated_experts with expert_capacity 1\.25"):
        Plan.from_json(file_of(ASKED, replicated_experts={"layers.0": [1]}))
