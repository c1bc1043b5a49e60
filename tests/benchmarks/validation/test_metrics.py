import math

import numpy as np
import pytest

from benchmarks.validation.metrics import (
    balanced_accuracy,
    best_among_first,
    bootstrap,
    false_rate,
    first_pick_regret,
    kendall_tau_b,
    largest_under_prediction,
    relative_errors,
)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 3], [1, 3, 2], 1 / 3),
        ([1, 2, 2, 3], [1, 3, 2, 4], 5 / math.sqrt(5 * 6)),  # one tie: 5 of 5 ranked pairs agree, 6 on the other side
        ([12, 2, 1, 12, 2], [1, 4, 7, 1, 0], -4 / math.sqrt(8 * 9)),  # 2 agree, 6 do not; 2 ties, 1 tie
    ],
)
def test_kendall_tau_b_equals_the_value_counted_by_hand(first, second, expected) -> None:
    assert kendall_tau_b(first, second) == pytest.approx(expected, abs=1e-12)
    assert kendall_tau_b(second, first) == pytest.approx(expected, abs=1e-12)


def test_ties_count_less_than_in_tau_a() -> None:
    tau_a = 5 / 6  # what dividing by all pairs would give: the mutation that the table above catches
    assert kendall_tau_b([1, 2, 2, 3], [1, 3, 2, 4]) > tau_a


def test_a_constant_side_ranks_nothing() -> None:
    assert math.isnan(kendall_tau_b([1, 1, 1], [1, 2, 3]))


def test_errors_are_relative_to_the_measurement() -> None:
    assert relative_errors([1.1, 2.0], [1.0, 2.5]) == pytest.approx([0.1, -0.2])


def test_the_largest_under_prediction_ignores_what_is_predicted_too_high() -> None:
    assert largest_under_prediction([150.0, 97.0, 99.0], [100.0, 100.0, 100.0]) == pytest.approx(0.03)
    assert largest_under_prediction([150.0], [100.0]) == 0.0


def test_balanced_accuracy_weighs_both_outcomes_alike() -> None:
    measured = [True] * 8 + [False] * 2
    always = [True] * 10
    assert balanced_accuracy(always, measured) == 0.5  # plain accuracy would be 0.8
    assert balanced_accuracy(measured, measured) == 1.0
    assert false_rate(always, measured) == 1.0
    assert false_rate([True] * 8 + [True, False], measured) == 0.5
    assert false_rate([True], [True]) == 0.0


def test_regret_is_of_the_plan_that_would_be_chosen() -> None:
    assert first_pick_regret([3.0, 1.0, 2.0], [10.0, 12.0, 11.0]) == pytest.approx(0.2)
    assert first_pick_regret([1.0, 2.0], [10.0, 12.0]) == 0.0


def test_the_best_plan_is_looked_for_among_the_first_three() -> None:
    measured = [5.0, 4.0, 3.0, 1.0]
    assert not best_among_first([1.0, 2.0, 3.0, 4.0], measured)
    assert best_among_first([1.0, 2.0, 4.0, 3.0], measured)


def test_the_interval_over_groups_is_wider_than_rows_would_make_it() -> None:
    values = np.repeat([0.1, 0.2, 0.3, 0.4], 25).tolist()
    by_group = bootstrap(values, np.repeat(np.arange(4), 25).tolist())
    by_row = bootstrap(values, range(100))
    assert by_group.high - by_group.low > by_row.high - by_row.low
    assert by_group == bootstrap(values, np.repeat(np.arange(4), 25).tolist())  # same draws each time
