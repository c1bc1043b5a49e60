"""What cannot have equal bits on any number of processes is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.request import Request

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("4 cpu", {"deterministic": 6}, "2, 4, 8, 16"),
    ("4 cpu", {"deterministic": 2}, "2 logical shards do not lie evenly on 4 devices"),
    ("4 H100-SXM", {"deterministic": 8}, "on CPUs, not on"),
    ("4 cpu", {"deterministic": 8, "dims": {"tp": 2}}, "dims with tp splits more than the batch"),
    ("4 cpu", {"deterministic": 8, "dims": {"pp": 2}}, "dims with pp splits more than the batch"),
    ("4 cpu", {"deterministic": 8, "schedule": "1f1b"}, "schedule='1f1b' splits more"),
    ("4 cpu", {"deterministic": 8, "mesh": (2, 2)}, "one axis of all 4 devices"),
    ("4 cpu", {"deterministic": 8, "dims": {"dp_shard": 2, "dp_replicate": 2}}, "one axis of all 4 devices"),
    ("4 cpu", {"deterministic": 8, "micro_batches": 4}, "not micro_batches=4"),
    ("4 cpu", {"deterministic": "yes"}, "a number of logical shards"),
]


@pytest.mark.parametrize(("cluster", "asked", "said"), REFUSED, ids=str)
def test_the_error_names_what_splits_more(cluster: str, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Request(cluster=Cluster.parse(cluster), **asked)


def test_plans_that_split_the_batch_alone_are_taken() -> None:
    for asked in ({}, {"dims": {"dp_shard": -1}}, {"dims": {"dp_replicate": 4}}, {"mesh": (4,)}, {"micro_batches": 2}):
        assert Request(cluster=Cluster.parse("4 cpu"), deterministic=8, **asked).deterministic == 8
