"""Routes of tokens: copies counted one by one, and legs over the links they take."""

from __future__ import annotations

from itertools import combinations

import pytest

from autopar.hardware.group_topology import GroupTopology
from benchmarks.validation.token_routes import copies, forwarded, straight


def counted(groups: int, experts: int, per_token: int, most: int) -> float:
    """The mean over all choices of groups and of experts in them."""
    block, found = experts // groups, list[int]()
    for drawn in combinations(range(groups), most):
        pool = [group * block + i for group in drawn for i in range(block)]
        found += [len({expert // block for expert in chosen}) for chosen in combinations(pool, per_token)]
    return sum(found) / len(found)


@pytest.mark.parametrize(
    ("groups", "experts", "per_token", "most"), [(2, 8, 2, 2), (4, 8, 3, 4), (4, 8, 3, 2), (8, 8, 2, 8), (4, 12, 6, 2)]
)
def test_a_token_meets_as_many_groups_as_are_counted(groups: int, experts: int, per_token: int, most: int) -> None:
    assert copies(groups, experts, per_token, most) == pytest.approx(counted(groups, experts, per_token, most))
    if most == groups:
        assert copies(groups, experts, per_token) == copies(groups, experts, per_token, most)


def test_one_group_meets_a_token_once_and_many_one_for_each_expert() -> None:
    assert copies(1, 64, 8) == 1
    assert copies(10**6, 10**6, 8) == pytest.approx(8)


def test_the_copies_of_a_published_table() -> None:
    # DeepEP on p5en: 936.5 us at 331.77 GB/s and 499.58 at 320.68 are the bytes of 4,096 tokens of width 7,168
    for microseconds, gigabytes, width in ((936.5, 331.77, 2), (499.58, 320.68, 1 + 4 / 128)):
        assert 4096 * 7168 * width * copies(8, 256, 8) == pytest.approx(microseconds * gigabytes * 1e3, rel=2e-3)


def test_forwarding_sends_a_copy_to_each_node_and_there_one_to_each_rank() -> None:
    topology = GroupTopology(ranks=64, nodes=8, ranks_per_node=8, groups_per_node=1)
    inside, across = forwarded(1.0, 256, 8, topology, most_nodes=4)
    assert (inside.topology.ranks, inside.topology.nodes) == (8, 1)
    assert (across.topology.ranks, across.topology.nodes, across.topology.groups_per_node) == (8, 8, 8)
    assert across.nbytes == copies(8, 256, 8, 4) < 4
    assert inside.nbytes == copies(64, 256, 8, 32) < straight(1.0, 8, topology).nbytes == 8
