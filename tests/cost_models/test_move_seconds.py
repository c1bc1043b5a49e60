"""Seconds of block moves: nothing takes none, more bytes take longer, and networks longer than the links of a node."""

from __future__ import annotations

import pytest

from autopar.cost_models.move_seconds import move_seconds
from autopar.hardware.cluster import Cluster
from autopar.layouts.block_moves import Move, Numbered

BLOCK = (((0, 1),),)


def moved(nbytes: int, *pairs: tuple[int, int], rounds: int = 1) -> list[Numbered]:
    return [(number, Move("w", *pair, BLOCK, nbytes // rounds)) for number in range(rounds) for pair in pairs]


@pytest.mark.parametrize("text", ["2x4 H100-SXM", "8 cpu"])
def test_seconds_follow_bytes_and_rounds(text: str) -> None:
    cluster = Cluster.parse(text)
    assert move_seconds([], cluster) == 0.0
    few, many = (move_seconds(moved(nbytes, (0, 1)), cluster) for nbytes in (1 << 20, 1 << 30))
    assert 0.0 < few < many
    assert move_seconds(moved(1 << 20, (0, 1), rounds=16), cluster) > few
    assert move_seconds(moved(1 << 30, (0, 1), (2, 3)), cluster) == many
    assert move_seconds(moved(1 << 30, (0, 1), (0, 2)), cluster) > many


def test_a_network_is_slower_than_a_node() -> None:
    cluster = Cluster.parse("2x4 H100-SXM")
    inside, across = (move_seconds(moved(1 << 30, pair), cluster) for pair in ((0, 1), (0, 4)))
    assert across > 2.0 * inside


def test_a_gigabyte_takes_what_the_link_says() -> None:
    cluster = Cluster.parse("1x8 H100-SXM")
    seconds = move_seconds(moved(1 << 30, (0, 1)), cluster)
    rate = cluster.intra_link.traits.pair_bytes_per_second or cluster.intra_link.bytes_per_second
    assert seconds == pytest.approx((1 << 30) / rate, rel=0.05)
