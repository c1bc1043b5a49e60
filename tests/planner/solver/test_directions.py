import numpy as np
import pytest

from autopar.planner.solver import MemoryRow, Problem
from autopar.planner.solver.assignments import Plans
from autopar.planner.solver.directions import Directions

LAYERS = 8


def scratch() -> Plans:
    """Every layer is fast with 2 bytes of scratch in its own row, or slow without; one byte of it fits."""
    rows = tuple(
        MemoryRow(name=str(layer), bytes={layer: np.array([2.0, 0.0])}, budget_bytes=1.0) for layer in range(LAYERS)
    )
    costs = tuple(np.array([1.0, 2.0]) for _ in range(LAYERS))
    plans = Plans(Problem(node_costs=costs, edges=(), memory_rows=rows))
    for label in (0, 1):
        plans.take(np.full(LAYERS, label))
    return plans


def test_an_excess_in_every_row_is_one_direction() -> None:
    plans = scratch()
    directions = Directions(plans)
    assert directions.master()[0] == -np.inf
    directions.add_excess(plans.known[0])
    assert np.allclose(directions.known[-1], 1 / LAYERS)
    value, multipliers = directions.master()
    # Half of the layers slow: 12 s; at half a second per byte in its row every layer is indifferent.
    assert value == pytest.approx(1.5 * LAYERS)
    assert multipliers == pytest.approx(np.full(LAYERS, 0.5))


def test_a_direction_is_added_once() -> None:
    plans = scratch()
    directions = Directions(plans)
    assert directions.add(np.eye(LAYERS)[2])
    assert not directions.add(3.0 * np.eye(LAYERS)[2])
    assert not directions.add(np.zeros(LAYERS))
    assert len(directions.known) == 1


def test_a_row_joins_while_it_would_raise_the_bound() -> None:
    plans = scratch()
    directions = Directions(plans)
    rows = 0
    while directions.add_row(1e-6, bound=float(LAYERS)):
        rows += 1
        assert rows <= LAYERS
    assert rows > 0
    assert not directions.add_row(1e-6, bound=2.0 * LAYERS)
