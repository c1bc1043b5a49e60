"""Recomputation chosen by what ranks hold: against every choice, and beside what equal shares of memory allow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_models.schedule_player import play_pipeline
from autopar.planner.pipelines.block_table import BlockTable
from autopar.planner.pipelines.choose_pipeline import try_families
from autopar.planner.pipelines.choose_recomputation import fastest_recomputation
from autopar.planner.pipelines.stage_search import StageChoice
from autopar.schedules.list_scheduler import build_schedule
from tests.planner.pipelines.random_tables import random_table

RANKS, MICRO_BATCHES = 2, 4
SLACK = 1.3
"""What greedy changes may cost more than the best ones."""


@pytest.mark.parametrize("seed", range(12))
def test_ranks_hold_no_more_than_their_limit_and_recompute_about_as_little_as_possible(seed: int) -> None:
    table = random_table(np.random.default_rng(seed), 8, capacity_bytes=1e9)
    schedule = build_schedule("interleaved", RANKS, MICRO_BATCHES, 2)
    cut = [StageChoice(2 * stage, 2 * stage + 2, 0, 0) for stage in range(4)]
    choices = list(itertools.product(range(len(table.modes)), repeat=4))
    peaks = np.array([_peaks(table, cut, modes) for modes in choices])
    limit = float(np.quantile(peaks.max(axis=1), 0.3))
    seconds = np.array([_seconds(table, cut, modes) for modes in choices])
    best = np.where(peaks.max(axis=1) <= limit, seconds.sum(axis=1), np.inf).min()
    found = fastest_recomputation(replace(table, capacity_bytes=limit), cut, schedule)
    assert found is not None
    assert max(_peaks(table, cut, found)) <= limit
    assert best <= sum(_seconds(table, cut, found)) <= SLACK * best


def test_nothing_is_recomputed_where_everything_fits_and_nothing_is_found_where_states_do_not() -> None:
    table = random_table(np.random.default_rng(0), 8, capacity_bytes=1e9)
    schedule = build_schedule("interleaved", RANKS, MICRO_BATCHES, 2)
    cut = [StageChoice(2 * stage, 2 * stage + 2, 0, 0) for stage in range(4)]
    fastest = [int(np.argmin([_seconds(table, [stage], [mode])[0] for mode in range(3)])) for stage in cut]
    assert fastest_recomputation(table, cut, schedule) == fastest
    assert fastest_recomputation(replace(table, capacity_bytes=1.0), cut, schedule) is None


def test_a_stage_that_holds_more_than_an_equal_share_fits_beside_one_that_holds_less() -> None:
    """The head alone holds more than half of what its rank may hold."""
    table = random_table(np.random.default_rng(1), 8, capacity_bytes=1e9)
    ones = np.ones((3, 8))
    table = replace(
        table,
        saved_bytes=0.1 * ones,
        weight_saved_bytes=0.1 * ones,
        forward_extra_bytes=0 * ones,
        backward_extra_bytes=0 * ones,
        state_bytes=np.array([*7 * [1.0], 7.0]),
        capacity_bytes=12.0,
    )
    (found,) = try_families(table, 2, 4, ["interleaved"])[:1]
    assert found.pipeline is not None
    assert found.pipeline.peak_bytes <= 12.0


def _peaks(table: BlockTable, cut: Sequence[StageChoice], modes: Sequence[int]) -> tuple[float, ...]:
    stages = [table.stage(stage.first, stage.end, mode) for stage, mode in zip(cut, modes, strict=True)]
    return play_pipeline(stages, build_schedule("interleaved", RANKS, MICRO_BATCHES, 2)).peak_bytes


def _seconds(table: BlockTable, cut: Sequence[StageChoice], modes: Sequence[int]) -> list[float]:
    return [table.stage(s.first, s.end, mode).compute_seconds for s, mode in zip(cut, modes, strict=True)]
