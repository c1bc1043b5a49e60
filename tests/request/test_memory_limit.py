"""What a user writes as a memory limit, in bytes of a device."""

from __future__ import annotations

import pytest

from autopar.cost_models.usable_memory import communicator_bytes
from autopar.hardware.cluster import Cluster
from autopar.request.memory_limit import budget

CLUSTER = Cluster.parse("8 H100-SXM")
USABLE = budget(None, CLUSTER)


@pytest.mark.parametrize(
    ("limit", "bytes_"),
    [("72GiB", 72 * 2**30), ("500MB", 5e8), ("1e9", 1e9), (2, 2.0), ("1B", 1.0), ("0.5 B", 0.5), ("0.001KB", 1.0),
     ("3KiB", 3072.0), ("3 mib", 3 * 2**20), ("1TiB", 2**40), ("2gb", 2e9), ("1TB", 1e12),
     (1, USABLE), ("1", USABLE), (0.25, USABLE / 4), ("0.25", USABLE / 4)],
)  # fmt: skip
def test_a_unit_says_bytes_and_a_bare_number_up_to_one_is_a_share(limit: float | str, bytes_: float) -> None:
    assert budget(limit, CLUSTER) == bytes_


def test_the_default_leaves_room_for_the_groups_that_any_plan_joins() -> None:
    alone, node, nodes = (budget(None, Cluster.parse(text)) for text in ("1 H100-SXM", "8 H100-SXM", "2x8 H100-SXM"))
    assert alone - node == node - nodes == communicator_bytes(8, "cuda")
