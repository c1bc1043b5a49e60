"""The stage search equals the search over all cuts, with memory, unequal stages and mixed groups of devices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_models.stage_costs import StageCosts
from autopar.errors import ConfigurationError
from autopar.planner.pipelines.stage_search import Cut, CutQuestion, cut_into_stages
from tests.planner.pipelines.random_tables import least_of_all_cuts, random_table, scaled


def _question(seed: int) -> CutQuestion:
    rng = np.random.default_rng(seed)
    blocks, groups = int(rng.integers(3, 7)), int(rng.integers(1, 3))
    most, micro_batches = int(rng.integers(1, 5)), int(rng.integers(1, 9))
    devices = tuple(int(size) for size in rng.integers(1, 5 if groups == 1 else 3, groups))
    capacity = float(rng.uniform(2.0, 14.0))
    tables = tuple(
        random_table(rng, blocks, size, group, capacity)
        for group, whole in enumerate(devices)
        for size in (1, 2, 4)
        if size <= whole
    )
    return CutQuestion(
        tables=tables,
        devices=devices,
        micro_batches=micro_batches,
        in_flight=tuple(min(left + 1, micro_batches) for left in range(most)),
        least_stages=int(rng.integers(1, most + 1)),
    )


@pytest.mark.parametrize("seed", range(10))
def test_the_search_equals_the_search_over_all_cuts(seed: int) -> None:
    infeasible = 0
    for case in range(30):
        question = _question(30 * seed + case)
        found, best = cut_into_stages(question), least_of_all_cuts(question)
        if found is None:
            infeasible += 1
            assert best == np.inf
        else:
            assert found.objective_seconds == pytest.approx(best, rel=1e-12)
            _check(question, found)
    assert 3 <= infeasible <= 25


def _with_slow_borders(question: CutQuestion, seed: int) -> CutQuestion:
    """Sends to the other group of devices take up to 3 s."""
    rng = np.random.default_rng(seed)
    slow = rng.uniform(0.0, 3.0, question.num_blocks - 1)
    return replace(question, tables=tuple(replace(table, across_seconds=slow) for table in question.tables))


@pytest.mark.parametrize("seed", range(5))
def test_borders_between_groups_of_devices_have_their_own_price(seed: int) -> None:
    """Against the search over all cuts; with one price for all borders, the mutation, other optima are found."""
    differs = 0
    for case in range(20):
        plain = _question(2000 + 20 * seed + case)
        question = _with_slow_borders(plain, case)
        found, best = cut_into_stages(question), least_of_all_cuts(question)
        assert (np.inf if found is None else found.objective_seconds) == pytest.approx(best, rel=1e-12)
        if found is not None:
            _check(question, found)
            forgetful = cut_into_stages(plain)
            assert forgetful is not None
            differs += forgetful.objective_seconds < found.objective_seconds * (1 - 1e-9)
    assert differs > 1


@pytest.mark.parametrize("seed", range(5))
def test_given_sizes_are_kept_in_order(seed: int) -> None:
    """Against the search over all cuts; the same devices in another order cost more, or less."""
    differs = 0
    for case in range(20):
        rng = np.random.default_rng(1000 + 20 * seed + case)
        blocks, sizes = int(rng.integers(4, 7)), tuple(int(size) for size in rng.permutation([1, 2, 3]))
        tables = tuple(random_table(rng, blocks, size, 0, float(rng.uniform(3.0, 14.0))) for size in (1, 2, 3, 2))
        question = CutQuestion(
            tables=tables, devices=(6,), micro_batches=4, in_flight=(1, 2, 3), least_stages=3, sizes=sizes
        )
        found, best = cut_into_stages(question), least_of_all_cuts(question)
        assert (np.inf if found is None else found.objective_seconds) == pytest.approx(best, rel=1e-12)
        if found is not None:
            _check(question, found)
            assert tuple(tables[stage.table].devices for stage in found.stages) == sizes
            free = cut_into_stages(replace(question, sizes=()))
            differs += free is not None and free.objective_seconds < found.objective_seconds * (1 - 1e-9)
    assert differs > 2


def _check(question: CutQuestion, found: Cut) -> None:
    """The stages are contiguous, use all devices, and fit."""
    assert [s.first for s in found.stages] == [0, *(s.end for s in found.stages[:-1])]
    assert found.stages[-1].end == question.num_blocks
    used = [0] * len(question.devices)
    for left, stage in enumerate(reversed(found.stages)):
        table = question.tables[stage.table]
        used[table.group] += table.devices
        costs: StageCosts = table.stage(stage.first, stage.end, stage.mode)
        held = costs.state_bytes + question.in_flight[left] * costs.saved_bytes
        assert held + max(costs.forward_extra_bytes, costs.backward_extra_bytes) <= table.capacity_bytes * (1 + 1e-12)
        assert costs.compute_seconds <= found.slowest_seconds * (1 + 1e-12)
    assert tuple(used) == question.devices


def test_a_search_that_forgets_memory_is_caught() -> None:
    """The mutation of the comparison: without the limit, the search over all cuts finds other optima."""
    questions = [_question(seed) for seed in range(40)]
    pairs = [(cut_into_stages(question), least_of_all_cuts(question, with_memory=False)) for question in questions]
    assert sum(found is None or found.objective_seconds > best * (1 + 1e-9) for found, best in pairs) > 10


def test_rounded_limits_would_be_caught() -> None:
    """Two blocks of a third of a second: a limit of 0.333 lets neither pass."""
    rng = np.random.default_rng(0)
    table = random_table(rng, 2)
    third = np.full((3, 2), 1.0 / 3.0)
    table = replace(table, forward_seconds=third, backward_seconds=0 * third, weight_seconds=0 * third)
    table = replace(table, send_seconds=np.zeros(1))
    found = cut_into_stages(CutQuestion(tables=(table,), devices=(2,), micro_batches=3, in_flight=(1, 2)))
    assert found is not None
    assert found.slowest_seconds == 1.0 / 3.0
    assert found.objective_seconds == pytest.approx(4.0 / 3.0, rel=1e-12)


def test_stages_may_be_unequal() -> None:
    """One heavy block takes the larger sub-mesh."""
    rng = np.random.default_rng(0)
    one = random_table(rng, 4)
    weights = np.array([[1.0, 1.0, 1.0, 6.0]] * 3)
    one = replace(one, forward_seconds=weights, backward_seconds=weights, weight_seconds=weights)
    tables = (one, scaled(one, 2))
    found = cut_into_stages(CutQuestion(tables=tables, devices=(3,), micro_batches=16, in_flight=(1, 2, 3)))
    assert found is not None
    assert [(s.first, s.end, s.table) for s in found.stages] == [(0, 3, 0), (3, 4, 1)]


def test_memory_makes_early_stages_recompute() -> None:
    rng = np.random.default_rng(1)
    table = random_table(rng, 4)
    saved = np.array([[1.0] * 4, [0.5] * 4, [0.1] * 4])
    table = replace(table, saved_bytes=saved, state_bytes=np.ones(4), capacity_bytes=3.5)
    table = replace(table, forward_extra_bytes=0 * saved, backward_extra_bytes=0 * saved)
    found = cut_into_stages(
        CutQuestion(tables=(table,), devices=(4,), micro_batches=8, in_flight=(1, 2, 3, 4), least_stages=4)
    )
    assert found is not None
    assert [stage.mode for stage in found.stages] == [1, 1, 0, 0]


def test_a_question_without_devices_or_with_other_blocks_is_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigurationError, match=r"tables of \[3, 4\] blocks"):
        CutQuestion(tables=(random_table(rng, 3), random_table(rng, 4)), devices=(1,), micro_batches=1, in_flight=(1,))
    with pytest.raises(ConfigurationError, match="2 to 1 stages"):
        CutQuestion(tables=(random_table(rng, 3),), devices=(1,), micro_batches=1, in_flight=(1,), least_stages=2)
