"""What a user writes as a memory limit, in bytes of a device."""

from __future__ import annotations

import pytest

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
