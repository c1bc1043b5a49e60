"""The bound lies under every played pipeline, and close to those that waste little."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from autopar.cost_models.schedule_player import play_pipeline, schedule_for
from autopar.planner.pipelines.block_table import BlockTable
from autopar.planner.pipelines.pipeline_bound import least_over_all_groups, least_step_seconds
from tests.planner.pipelines.random_tables import random_table, scaled

FAMILIES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "zb-v")


def _shortest(table: BlockTable, num_ranks: int, micro_batches: int, family: str, chunks: int) -> float:
    """Of all contiguous cuts, played."""
    found = []
    for cuts in combinations(range(1, table.num_blocks), num_ranks * chunks - 1):
        ends = (0, *cuts, table.num_blocks)
        stages = [table.stage(first, end, 0) for first, end in pairwise(ends)]
        schedule = schedule_for(family, stages, num_ranks, micro_batches)
        found.append(play_pipeline(stages, schedule).step_seconds)
    return min(found)


@pytest.mark.parametrize("seed", range(6))
def test_no_played_pipeline_is_under_the_bound(seed: int) -> None:
    table = random_table(np.random.default_rng(seed), 6)
    for family in FAMILIES:
        chunks = 2 if family in ("interleaved", "zb-v") else 1
        step = _shortest(table, 2, 5, family, chunks)
        assert least_step_seconds(table, 2, 5) <= step * (1 + 1e-12)
        if chunks == 1:
            alone = least_step_seconds(table, 2, 5, one_stage_each=True)
            assert least_step_seconds(table, 2, 5) * (1 - 1e-12) <= alone <= step * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_two_kinds_of_devices_share_the_work(seed: int) -> None:
    """No played pipeline is under the bound; where one kind is three times as fast, the bound is that of four devices,
    and work counted as if all were fast, or 30 % more, is not it."""
    slow = random_table(np.random.default_rng(seed), 8)
    fast = scaled(slow, 1, group=1, speed=3.0)
    least = least_over_all_groups([slow, fast], [1, 1], 16)
    slow_alone, fast_alone = (least_step_seconds(table, 1, 16) for table in (slow, replace(fast, group=0)))
    assert max(least, fast_alone / 2) == least
    assert least == pytest.approx(1.0 / (1.0 / slow_alone + 1.0 / fast_alone), rel=2e-2)
    steps = []
    for end in range(1, 8):
        for pair in ((slow, fast), (fast, slow)):
            stages = [pair[0].stage(0, end, 0), pair[1].stage(end, 8, 0)]
            steps.append(play_pipeline(stages, schedule_for("zb-h2", stages, 2, 16)).step_seconds)
    assert least <= min(steps) < 1.3 * least


def test_a_bound_that_counts_too_much_is_caught() -> None:
    """The mutation of the comparison: 30 % more would be above what zero bubbles reach."""
    table = random_table(np.random.default_rng(0), 8)
    assert 1.3 * least_step_seconds(table, 2, 16, one_stage_each=True) > _shortest(table, 2, 16, "zb-h2", 1)


def test_equal_blocks() -> None:
    ones, nothing = np.ones((3, 4)), np.zeros(4)
    table = random_table(np.random.default_rng(0), 4)
    table = replace(
        table,
        forward_seconds=ones,
        backward_seconds=ones,
        weight_seconds=ones,
        once_seconds=nothing,
        state_bytes=nothing,
    )
    assert least_step_seconds(table, 2, 8, one_stage_each=True) == pytest.approx(50.0)
    assert least_step_seconds(table, 2, 8) == pytest.approx(48.0)
    assert least_step_seconds(table, 5, 8, one_stage_each=True) == np.inf


def test_work_of_once_per_step_is_done_once() -> None:
    """Blocks of 3 s and 1, 2, 3, 4 s once, 8 micro-batches: 4 * 24 + 10 s on two ranks, or 28 s of the largest block;
    a block that stands on two ranks is half of each one's work."""
    table = random_table(np.random.default_rng(0), 4)
    ones = np.ones((3, 4))
    table = replace(
        table, forward_seconds=ones, backward_seconds=ones, weight_seconds=ones, once_seconds=np.arange(1.0, 5.0)
    )
    assert least_step_seconds(table, 2, 8) == pytest.approx((4 * 24 + 10) / 2)
    assert least_step_seconds(table, 8, 8) == pytest.approx(24 + 4)
    assert least_step_seconds(table, 8, 8, both_ways=True) == pytest.approx((24 + 4) / 2)
    assert least_step_seconds(table, 64, 1, both_ways=True) == pytest.approx(4 * 2)  # one micro-batch, there and back
