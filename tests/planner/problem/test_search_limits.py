"""The search modes: data that grows from mode to mode, carried into the plan's question."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConfigurationError
from autopar.planner.problem.search_limits import SEARCH
from autopar.request.search_mode import Mode


def test_every_mode_has_limits_and_each_searches_longer_than_the_one_before() -> None:
    assert tuple(SEARCH) == get_args(Mode)
    limits = [(search.exact_seconds, search.memory_seconds, search.memory_rounds) for search in SEARCH.values()]
    for shorter, longer in itertools.pairwise(limits):
        assert all(a <= b for a, b in zip(shorter, longer, strict=True))
        assert shorter != longer


def test_the_plan_says_in_which_mode_it_was_made() -> None:
    plan = autopar.plan(nn.Linear(8, 8), torch.randn(4, 8), cluster="2 H100-SXM", mesh=(2,), mode="fast",
        with_baselines=False)
    assert plan.question["mode"] == "fast"


def test_an_unknown_mode_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="fast, default, max"):
        autopar.plan(nn.Linear(8, 8), torch.randn(4, 8), mode="slow")  # type: ignore[arg-type]


def test_a_fast_search_compares_with_no_pipelines_and_the_others_do() -> None:
    assert [mode for mode, search in SEARCH.items() if search.tries_pipelines] == ["default", "max"]
