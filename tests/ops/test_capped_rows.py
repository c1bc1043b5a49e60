"""Places of rows: the first of every expert have them, and what has none comes back as zeros."""

from __future__ import annotations

import torch

from autopar.ops.capped_rows import capped_order, counted_drops
from autopar.ops.experts import rows_at


def test_the_first_rows_of_an_expert_have_its_places() -> None:
    """The example of the module: two ranks, three experts, two places."""
    ids = torch.tensor([2, 0, 7, 0, 0])
    with counted_drops() as counted:
        order, place, regrouped, ungrouped, each = capped_order(ids, 0, 3, 2, 2, 2, 1, "layer")
    assert order.tolist() == [1, 3, 5, 5, 0, 5, 5, 5]
    assert place.tolist() == [4, 0, 8, 1, 8]
    assert regrouped.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert regrouped[ungrouped].tolist() == list(range(8))
    assert each.tolist() == [4], "of rank 1: two places of two ranks"
    assert counted["layer"].tolist() == [[3, 0, 1], [1, 0, 0]]


def test_a_place_without_a_row_and_a_row_without_a_place_are_zeros() -> None:
    rows = torch.full((3, 2), torch.nan)
    rows[0] = 1.0
    found = rows_at(rows, torch.tensor([0, 3, 3]), True)
    assert found.tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert rows_at(torch.tensor([4, 5]), torch.tensor([2, 1]), True).tolist() == [0, 5]


def test_experts_of_a_group_that_begins_later() -> None:
    ids = torch.tensor([4, 3, 4, 1, 6])
    order, place, *_ = capped_order(ids, 3, 3, 2, 2, 1, 2, "later")
    assert (order.tolist(), place.tolist()) == ([1, 0, 5, 5], [1, 0, 4, 4, 4])


def test_what_was_counted_before_is_not_counted_again() -> None:
    ids = torch.tensor([0, 0, 1])
    for _ in range(2):
        capped_order(ids, 0, 2, 1, 2, 1, 1, "before")
    with counted_drops() as outer:
        capped_order(ids, 0, 2, 1, 2, 1, 1, "before")
        with counted_drops() as inner:
            capped_order(ids, 0, 2, 1, 2, 2, 1, "before")
    assert (inner["before"].tolist(), outer["before"].tolist()) == ([[2, 1], [0, 0]], [[4, 2], [1, 0]])
    with counted_drops() as none:
        pass
    assert none == {}


def test_shapes_are_known_without_values() -> None:
    arguments = (torch.randint(8, (16,)), 0, 8, 2, 4, 3, 2, "shapes")
    torch.library.opcheck(capped_order, arguments, test_utils=("test_schema", "test_faketensor"))
