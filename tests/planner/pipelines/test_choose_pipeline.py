"""Families compared by playing them: the best of brute force among cuts, memory that rules families out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.errors import ConfigurationError
from autopar.planner.pipelines.block_table import BlockTable
from autopar.planner.pipelines.choose_pipeline import try_families, try_tables
from tests.planner.pipelines.random_tables import random_table


def _even(blocks: int, capacity_bytes: float = 1e9) -> BlockTable:
    table = random_table(np.random.default_rng(0), blocks, capacity_bytes=capacity_bytes)
    ones = np.ones((3, blocks))
    return replace(
        table,
        forward_seconds=ones,
        backward_seconds=ones * np.array([[1.0], [1.2], [2.0]]),
        weight_seconds=ones,
        saved_bytes=ones * np.array([[1.0], [0.5], [0.1]]),
        weight_saved_bytes=0.5 * ones * np.array([[1.0], [0.5], [0.1]]),
        forward_extra_bytes=0 * ones,
        backward_extra_bytes=0 * ones,
        state_bytes=np.ones(blocks),
        once_seconds=np.zeros(blocks),
        send_seconds=np.zeros(blocks - 1),
    )


def test_equal_blocks_under_1f1b_take_the_closed_form() -> None:
    (found,) = try_families(_even(8), 4, 16, ["1f1b"])
    assert found.pipeline is not None
    assert found.pipeline.step_seconds == pytest.approx((16 + 3) * 6.0)
    assert [(s.first, s.end) for s in found.pipeline.cut.stages] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_stages_are_interleaved_as_often_as_sends_allow() -> None:
    """Eight ranks and micro-batches wait for 7 / 8 of the work under 1F1B, an eighth of that with 8 stages each."""
    assert try_families(_even(64), 8, 8, ["interleaved"])[0].chunks == 8
    dear = replace(_even(64), send_seconds=np.full(63, 30.0))
    assert try_families(dear, 8, 8, ["interleaved"])[0].chunks == 2


def test_a_number_of_stages_that_does_not_divide_the_blocks_does_not_end_the_comparison() -> None:
    """Two ranks of 32 equal blocks: three stages each are uneven, and take longer than two or four."""
    tried = {one.chunks: one.pipeline for one in try_families(_even(32), 2, 4, ["interleaved"])}
    seconds = {chunks: pipeline.step_seconds for chunks, pipeline in tried.items() if pipeline is not None}
    assert seconds[3] > seconds[2] > seconds[4] > seconds[8]


def test_zero_bubbles_win_where_memory_allows_them() -> None:
    tried = try_families(_even(8), 4, 16)
    first = tried[0].pipeline
    assert first is not None
    assert first.family in ("zb-h2", "zb-2p", "zb-v", "dualpipe")
    seconds = [one.pipeline.step_seconds for one in tried if one.pipeline]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(("states", "is_once"), [(1.5, True), (20.0, False)])
def test_parameters_are_gathered_once_where_that_fits(states: float, is_once: bool) -> None:
    each = _even(8, 12.0)
    once = replace(each, gather_once=True, weight_seconds=0.5 * each.weight_seconds, state_bytes=states * np.ones(8))
    (first, *_) = try_tables([once, each], 4, 16, ["1f1b"])
    assert first.pipeline is not None
    assert first.pipeline.table.gather_once == is_once
    assert all(stage.mode == 0 for stage in first.pipeline.cut.stages)


def test_memory_rules_families_out() -> None:
    """Two blocks a rank save 2 bytes: 1F1B keeps at most 4 of them beside 2 of states, ZB-H2 7, GPipe 16."""
    tried = {one.family: one.pipeline for one in try_families(_even(8, 10.0), 4, 16, ["1f1b", "gpipe", "zb-h2"])}
    assert tried["1f1b"] is not None
    assert all(stage.mode == 0 for stage in tried["1f1b"].cut.stages)
    for pipeline in tried.values():
        assert pipeline is None or pipeline.peak_bytes <= 10.0
    assert tried["gpipe"] is not None
    assert any(stage.mode > 0 for stage in tried["gpipe"].cut.stages)


def test_nothing_fits_where_states_alone_are_too_large() -> None:
    assert all(one.pipeline is None for one in try_families(_even(8, 1.0), 4, 8))


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="3 pieces of the model do not fill 4 stages"):
        try_families(_even(3), 4, 8)


def test_both_directions_need_pairs_of_ranks_and_pay_for_adding_up_their_gradients() -> None:
    table = _even(8)
    (free,) = try_families(table, 4, 4, ["chimera"])
    (paid,) = try_families(replace(table, twin_seconds=np.full(8, 0.25)), 4, 4, ["chimera"])
    assert free.pipeline is not None
    assert paid.pipeline is not None
    assert paid.pipeline.step_seconds == pytest.approx(free.pipeline.step_seconds + 4 * 0.25)
    one = try_families(table, 4, 4, ["1f1b"])[0].pipeline
    assert one is not None
    assert free.pipeline.step_seconds < one.step_seconds
    assert free.pipeline.peak_bytes >= one.peak_bytes
    assert "chimera" not in {tried.family for tried in try_families(table, 3, 4)}
    with pytest.raises(ConfigurationError, match="even number of ranks, not 3"):
        try_families(table, 3, 4, ["chimera"])


def test_steps_that_do_not_drain_keep_three_more_copies_of_the_weights_and_are_never_tried_unasked() -> None:
    table = replace(_even(8), parameter_bytes=np.full(8, 0.25))
    (stale,) = try_families(table, 4, 8, ["2bw"])
    (plain,) = try_families(table, 4, 8, ["1f1b"])
    assert stale.pipeline is not None
    assert plain.pipeline is not None
    assert stale.pipeline.peak_bytes == pytest.approx(plain.pipeline.peak_bytes + 2 * 3 * 0.25)
    assert stale.pipeline.step_seconds == pytest.approx(8 * 6.0 + 3 * 2.0)
    assert "2bw" not in {tried.family for tried in try_families(table, 4, 8)}


def test_borders_inside_of_a_node_cost_its_link() -> None:
    table = replace(random_table(np.random.default_rng(0), 5), near_seconds=np.full(4, 1e-3), groups_per_node=2)
    found = table.borders([1, 2, 4], (0, 1, 2, 3))
    assert found.near == {0, 2}
    assert found.seconds == (1e-3, float(table.send_seconds[1]), 1e-3)
    back_and_forth = table.borders([1, 2, 4], (0, 1, 1, 0))
    assert back_and_forth.near == {0, 1, 2}
