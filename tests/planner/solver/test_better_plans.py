"""Rounds of looking for better plans go on while they find some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.planner.solver import better_plans
from autopar.planner.solver.better_plans import IMPROVE_ROUNDS, improve


@pytest.mark.parametrize(
    ("objectives", "rounds"),
    [([10.0, 10.0, 10.0], 2), ([10.0, 9.0, 8.0, 8.0, 7.0], 3), ([10.0, 9.0, 8.0, 7.0, 6.0], IMPROVE_ROUNDS)],
)
def test_rounds_end_with_the_first_that_finds_nothing_but_the_very_first(
    monkeypatch: pytest.MonkeyPatch, objectives: list[float], rounds: int
) -> None:
    """objectives: of the best plan, before the first round and after each."""
    done: list[str] = []

    def step(name: str) -> Any:
        return lambda search: done.append(name)

    names = ("activate_exceeded", "splice_plans", "_fitting", "_repair")
    for name in names:
        monkeypatch.setattr(better_plans, name, step(name))
    plans = SimpleNamespace(objective=lambda: objectives[len(done) // len(names)])
    search: Any = SimpleNamespace(plans=plans, finished=lambda: False)
    improve(search)
    assert done == [*names] * rounds
