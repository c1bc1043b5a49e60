"""A way is one of those of its axis, and goes with the axis."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.request import Request


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"dims": {"ep": 2}, "ep": "dispach"}, "ep='dispach': write one of .*masked, capacity; did you mean"),
        ({"dims": {"ep": 2}, "ep": "ring"}, "ep='ring': write one of dispatch, two_level, gather, masked"),
        ({"dims": {"tp": 2}, "ep": "gather"}, r"products of experts run over an axis ep, .*write dims=\{'ep': 4\}"),
        ({"dims": {"ep": 1, "tp": 2}, "ep": "gather"}, "there is none"),
        ({"ep": "masked"}, "there is none"),
        ({"ep": "capacity", "expert_capacity": 1.25}, "there is none"),
        ({"dims": {"ep": 2}, "ep": "capacity"}, "ep='capacity' needs expert_capacity: .* such as 1.25"),
        ({"dims": {"ep": 2}, "expert_capacity": 1.25}, "expert_capacity=1.25 drops rows, which ep=None does not"),
        ({"dims": {"ep": 2}, "ep": "dispatch", "expert_capacity": 2}, "which ep='dispatch' does not: write ep='cap"),
        ({"dims": {"ep": 2, "ep_inner": 2}, "ep": "dispatch"}, "one axis ep at once: .* or ep='two_level' for rows"),
        ({"dims": {"ep": 2, "ep_inner": 2}, "ep": "capacity", "expert_capacity": 2}, "ep='capacity' sends rows over"),
        ({"dims": {"ep_inner": 2, "tp": 2}}, "ep_inner=2 is what lies inside of an axis ep, and there is none"),
        ({"dims": {"ep": 2}, "cp": "gather"}, r"attention runs over an axis cp, .*write dims=\{'cp': 4\}"),
        ({"dims": {"cp": 2}, "cp": "dispatch"}, "cp='dispatch': write one of ring, ulysses, gather"),
    ],
)
def test_a_way_that_there_is_not_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Request(cluster=Cluster.parse("2 cpu"), **asked)


def test_ways_of_two_axes_go_together() -> None:
    asked = Request(cluster=Cluster.parse("4 cpu"), dims={"cp": 2, "ep": -1}, cp="gather", ep="gather")
    assert (asked.cp, asked.ep) == ("gather", "gather")
