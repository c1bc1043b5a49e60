"""Experts placed by load: no order of as many experts per rank has a busiest rank with fewer rows."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from autopar.plans.expert_placement import blocks, busiest_share, least_share, moved, placed_experts, places_of, runs_of


def zipf(experts: int, exponent: float) -> list[float]:
    shares = [1.0 / (i + 1) ** exponent for i in range(experts)]
    return [share / sum(shares) for share in shares]


def least_of_all(shares: Sequence[float], ranks: int, rest: tuple[int, ...] | None = None) -> float:
    """Over all partitions."""
    rest = tuple(range(len(shares))) if rest is None else rest
    if not rest:
        return 0.0
    each = len(shares) // ranks - 1
    return min(
        max(math.fsum(shares[e] for e in (rest[0], *others)),
            least_of_all(shares, ranks, tuple(e for e in rest[1:] if e not in others)))
        for others in itertools.combinations(rest[1:], each)
    )  # fmt: skip


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (8, 4), (9, 3)])
def test_no_partition_has_a_lighter_busiest_rank(experts: int, ranks: int) -> None:
    draw = random.Random(3)
    for _ in range(20):
        drawn = [draw.random() ** 3 for _ in range(experts)]
        shares = [one / sum(drawn) for one in drawn]
        found, least = placed_experts(shares, (ranks,)), least_of_all(shares, ranks)
        assert sorted(found.order) == list(range(experts))
        assert least == pytest.approx(found.busiest, rel=1.1e-3)
        assert found.bound <= least * (1 + 1e-12)
        assert found.busiest == busiest_share(shares, found.order, ranks) <= found.before


@pytest.mark.parametrize(("experts", "ranks"), [(64, 8), (128, 16), (256, 64)])
@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_many_experts_are_within_a_hundredth_of_the_bound(experts: int, ranks: int, exponent: float) -> None:
    found = placed_experts(zipf(experts, exponent), (ranks,))
    assert found.busiest <= 1.01 * found.bound
    assert found.bound == least_share(zipf(experts, exponent), ranks)


def test_what_is_even_stays_where_it_lies_and_little_moves() -> None:
    even = placed_experts([0.125] * 8, (4,))
    assert (even.order, even.moves) == (tuple(range(8)), False)
    shares = zipf(16, 1.0)
    first = placed_experts(shares, (4,))
    assert first.moves
    again = placed_experts(shares, (4,), first.order)
    assert (again.order, again.moves) == (first.order, False)
    swapped = [*shares]
    swapped[first.order[0]], swapped[first.order[4]] = shares[first.order[4]], shares[first.order[0]]
    assert moved(first.order, placed_experts(swapped, (4,), first.order).order, 4) <= 2


def test_nodes_are_as_even_as_their_ranks() -> None:
    shares = zipf(16, 0.7)
    found = placed_experts(shares, (2, 2))
    assert busiest_share(shares, found.order, 2) < 0.51
    assert busiest_share(shares, found.order, 4) < 1.1 * found.bound
    assert all(list(block) == sorted(block) for block in blocks(found.order, 4))


def test_orders_and_places_are_inverse_and_said_in_runs() -> None:
    order = (2, 0, 3, 1)
    assert [order[place] for place in places_of(order)] == [0, 1, 2, 3]
    assert runs_of([0, 1, 2, 3, 8, 10, 11]) == "0-3, 8, 10-11"
