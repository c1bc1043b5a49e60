import numpy as np
import pytest

from autopar.planner.solver import FORBIDDEN, MemoryRow, Problem
from autopar.planner.solver.assignments import Plans


def two_labels(budget: float) -> Plans:
    """One node: 2 s with 10 bytes, or 1 s with 30 bytes, or FORBIDDEN with 0; 5 bytes are always used."""
    row = MemoryRow(name="m", bytes={0: np.array([10.0, 30.0, 0.0])}, budget_bytes=budget, constant_bytes=5.0)
    return Plans(Problem(node_costs=(np.array([2.0, 1.0, FORBIDDEN]),), edges=(), memory_rows=(row,)))


def test_the_best_is_the_cheapest_that_fits() -> None:
    plans = two_labels(budget=15.0)
    plans.take(np.array([1]))
    assert plans.best is None
    assert plans.answer().cost == 1.0
    plans.take(np.array([0]))
    assert plans.objective() == 2.0
    assert plans.worst_excess().tolist() == [2.0]


def test_a_forbidden_plan_is_never_the_best() -> None:
    plans = two_labels(budget=15.0)
    plans.take(np.array([2]))
    assert plans.best is None
    assert not plans.known
    assert plans.answer().cost == FORBIDDEN


def test_the_master_prices_a_byte_at_what_it_saves() -> None:
    plans = two_labels(budget=25.0)
    for label in (0, 1):
        plans.take(np.array([label]))
    value, multipliers = plans.master(np.eye(1))
    # Half-way between 10 and 30 bytes costs 1.5 s; 20 bytes save 1 s.
    assert value == pytest.approx(1.5)
    assert multipliers == pytest.approx([0.05])
