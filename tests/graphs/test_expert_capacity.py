"""How many places an expert has for the rows of a rank, and which products know it."""

from __future__ import annotations

import pytest

from autopar.graphs.expert_capacity import capacity_of, places_per_expert, with_expert_capacity
from autopar.graphs.expert_loads import expert_products
from tests.passes.kernels.test_dispatched_rows import captured


@pytest.mark.parametrize(
    ("rows", "experts", "factor", "places"),
    [
        (32, 8, 1.25, 5),
        (32, 8, 1, 4),
        (33, 8, 1.0, 5),
        (100, 10, 1.1, 11),  # 1.1 * 100 / 10 is 11.000000000000002 in floats
        (30, 3, 0.7, 7),
        (4, 64, 0.01, 1),
        (6, 4, 100.0, 6),  # an expert cannot get more rows than there are
    ],
)
def test_places_are_a_part_of_the_even_share_rounded_up(rows: int, experts: int, factor: float, places: int) -> None:
    assert places_per_expert(rows, experts, factor) == places


def test_all_products_of_experts_carry_the_factor() -> None:
    program, _ = captured(4, "even")
    assert with_expert_capacity(program, None) is program
    found = with_expert_capacity(program, 1.5)
    assert {capacity_of(node) for node in expert_products(found.graph)} == {1.5}
    assert {capacity_of(node) for node in expert_products(program.graph)} == {None}
    assert with_expert_capacity(found, 1.5) is found
