"""What waits on the host between its uses changes nothing of what is computed, and is seen to travel."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.offload_jobs import Offloaded
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOB = "tests.distributed.offload_jobs:parity"
CASES: dict[str, dict[str, Any]] = {
    "ZeRO-3 x Megatron": {"dims": {"dp_shard": 2, "tp": 2}},
    "micro-batches": {"dims": {"dp_shard": 4}, "micro_batches": 2},
    "stages": {"dims": {"pp": 2, "dp_shard": 2}, "micro_batches": 2, "schedule": "1f1b"},
}
ROWS = [(case, name) for case in CASES for name in ("llama", "gpt2")] + [("ZeRO-3 x Megatron", "resnet")]


@pytest.mark.exhaustive(sample="ZeRO-3 x Megatron-llama")
@pytest.mark.parametrize(("case", "name"), ROWS)
def test_a_step_has_the_bits_of_one_that_keeps_all_on_the_device(pool: Pool, case: str, name: str) -> None:
    found: list[dict[str, Offloaded]] = pool.run(
        JOB, world_size=4, timeout=300.0, name=name, cases={case: CASES[case]}, ahead=20_000.0
    )
    for each in (rank[case] for rank in found):
        assert not each.different
        assert each.sent
        assert each.brought


def test_a_copy_scaled_by_a_ten_thousandth_is_noticed(pool: Pool) -> None:
    arguments = {"name": "gpt2", "cases": {"alone": {}}, "scale": 1.0001}
    (found,) = pool.run(JOB, world_size=1, timeout=300.0, **arguments)
    assert found["alone"].different
