"""A stage pays for the parameters that it shares with other stages, and for no others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.planner.pipelines.random_tables import random_table


def test_only_stages_that_read_a_shared_parameter_pay_for_adding_up_its_gradient() -> None:
    plain = random_table(np.random.default_rng(0), 4)
    table = replace(plain, shared=(((0, 3), 5.0), ((1, 2), 7.0)))

    def added(first: int, end: int) -> float:
        return table.stage(first, end, 0).once_seconds - plain.stage(first, end, 0).once_seconds

    assert added(0, 1) == pytest.approx(5.0)
    assert added(0, 2) == pytest.approx(12.0)
    assert added(1, 3) == pytest.approx(0.0)  # both readers in one stage: nothing is sent
    assert added(0, 3) == pytest.approx(5.0)
    assert added(0, 4) == pytest.approx(0.0)
