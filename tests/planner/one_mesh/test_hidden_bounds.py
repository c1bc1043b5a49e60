"""What solves under some shares prove for the others: below the optimum, whatever the plans are."""

from __future__ import annotations

import math
import random

from autopar.layouts.placement import Mesh
from autopar.planner.one_mesh.hidden_bounds import HiddenBounds

MESH, OTHER = Mesh(("inner",), (4,)), Mesh(("outer", "inner"), (2, 2))


def optimum(plans: list[tuple[float, float]], share: float) -> float:
    """Plans: (sum that counts everything, communication of parameters in it)."""
    return min(total - share * of_parameters for total, of_parameters in plans)


def test_no_bound_is_above_the_optimum_and_the_line_between_two_shares_is_reached() -> None:
    draw = random.Random(0)
    for _ in range(200):
        totals = [draw.uniform(1.0, 2.0) for _ in range(5)]
        plans = [(total, draw.uniform(0.0, total)) for total in totals]
        bounds = HiddenBounds({MESH: optimum(plans, 0.0)})
        bounds.learn(MESH, 0.9, optimum(plans, 0.9))
        for share in (0.0, 0.25, 0.5, 0.75, 0.9):
            assert bounds.at_least(MESH, share) <= optimum(plans, share) * (1 + 1e-12)
    one_plan = HiddenBounds({MESH: 1.0})
    one_plan.learn(MESH, 0.8, 0.2)
    assert math.isclose(one_plan.at_least(MESH, 0.4), 0.6)


def test_a_larger_share_bounds_smaller_ones_and_nothing_else_does() -> None:
    bounds = HiddenBounds({})
    assert bounds.at_least(MESH, 0.5) == -math.inf
    bounds.learn(MESH, 0.9, 0.3)
    assert bounds.at_least(MESH, 0.5) == 0.3
    assert bounds.at_least(MESH, 0.95) == -math.inf
    assert bounds.at_least(OTHER, 0.5) == -math.inf


def test_a_weaker_bound_takes_nothing_away() -> None:
    bounds = HiddenBounds({MESH: 1.0})
    bounds.learn(MESH, 0.5, 0.6)
    bounds.learn(MESH, 0.5, 0.4)
    assert bounds.at_least(MESH, 0.5) == 0.6
