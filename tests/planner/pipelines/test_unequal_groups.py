"""Stages on rank groups of different sizes: chosen, pinned, written, and lowered group by group."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import autopar
from autopar.demo.gpt import GPT, GPTConfig
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.hardware.rank_groups import cluster_of
from autopar.planner.pipelines import unequal_groups
from autopar.planner.pipelines.unequal_groups import best_unequal, place_groups
from autopar.plans.parallel_plan import Plan
from tests.planner.pipelines.lowered import lower_every_stage
from tests.planner.pipelines.random_tables import random_table, scaled


def _model() -> GPT:
    return GPT(GPTConfig(vocabulary=64, positions=16, width=32, heads=4, layers=6))


def _plan(sizes: list[int], **options: Any) -> Plan:
    tokens = torch.zeros(12, 16, dtype=torch.long)
    return autopar.plan(
        _model(), (tokens, tokens), cluster=f"{sum(sizes)} cpu", dims={"pp": sizes}, mode="fast", **options,
        with_baselines=False,
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return _plan([1, 3], schedule="1f1b", micro_batches=4)


@pytest.mark.exhaustive
def test_groups_keep_the_order_of_stages_and_the_larger_takes_the_lower_ranks(plan: Plan) -> None:
    assert plan.pipeline is not None
    assert [group.size for group in plan.rank_groups] == [1, 3]
    assert [group.first_rank for group in plan.rank_groups] == [3, 0]
    assert plan.num_ranks == 4
    assert [stage.rank_group for stage in plan.pipeline.stages] == [0, 1]
    assert any("groups of 1, 3 devices" in note for note in plan.notes)
    assert Plan.from_json(plan.to_json()) == plan
    assert "pp=1x1 + 1x3" in plan.summary() or "pp=1 + 3" in plan.summary()


def test_the_bound_is_below_the_step(plan: Plan) -> None:
    assert 0 < plan.bound_seconds < plan.objective_seconds


def test_every_stage_is_lowered_with_the_layouts_of_its_group(plan: Plan) -> None:
    lower_every_stage(_model(), torch.zeros(3, 16, dtype=torch.long), plan)


def test_three_sizes_in_any_order() -> None:
    plan = _plan([2, 1, 3], micro_batches=6)
    assert [group.size for group in plan.rank_groups] == [2, 1, 3]
    assert [group.first_rank for group in plan.rank_groups] == [3, 5, 0]


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ([4], {}, "two or more positive numbers that add up to 4"),
        ([1, 3], {"schedule": "interleaved"}, "schedules are 1f1b"),
        ([0, 4], {}, "positive numbers"),
    ],
)
def test_sizes_that_cannot_be_meant_are_refused(sizes: list[int], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        _plan(sizes, **options)


def test_equal_groups_are_played_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two meshes per size: what the formula likes best plays slower than a stage on every device."""
    rng = np.random.default_rng(8)
    base = [random_table(rng, 8) for _ in range(2)]
    slow_ends = [replace(table, once_seconds=20 * table.once_seconds) for table in base]
    subs: list[Any] = [SimpleNamespace(table=scaled(table, size)) for size in (1, 2) for table in slow_ends]

    def step(sizes: tuple[int, ...] = ()) -> float:
        found = best_unequal(subs, [(4, 4)], 4, sizes)
        assert found is not None
        return found.pipeline.step_seconds

    pinned = min(step((2, 2)), step((1, 1, 1, 1)))
    assert step() <= pinned
    monkeypatch.setattr(unequal_groups, "_of_equal_groups", lambda _: ())
    assert step() > pinned, "this shows something"


def test_groups_lie_inside_nodes_or_fill_them() -> None:
    assert place_groups((1, 2, 4, 1), 4) == (6, 4, 0, 7)
    assert place_groups((2, 8, 2), 4) == (8, 0, 10)
    assert place_groups((3, 3, 2), 4) is None
    assert cluster_of(Cluster.parse("2x8 H100-SXM"), 4).num_devices == 4
    with pytest.raises(ConfigurationError, match="a rank group of 3"):
        cluster_of(Cluster.parse("2x8 H100-SXM"), 3)
