"""Weights have equal bits behind some steps on 1, 2 and 4 processes, under DDP, ZeRO-1, ZeRO-3 and in bf16."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.deterministic_jobs"
RUNS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"precision": "bf16"}, {"mutation": "order"}],
    2: [{"axis": "dp_replicate"}, {"axis": "dp_shard", "zero_1": True}],
    4: [
        {"axis": "dp_shard"},
        {"axis": "dp_shard", "precision": "bf16"},
        {"axis": "dp_replicate", "mutation": "sums"},
    ],
}


def test_bits_do_not_depend_on_the_number_of_processes(pool: Pool) -> None:
    found = {}
    for processes, runs in RUNS.items():
        first, *others = pool.run(f"{JOBS}:hashes", world_size=processes, runs=runs, processes=processes)
        assert all(other == first for other in others)
        found[processes] = first
    plain, bf16, in_order = found[1]
    assert plain == found[2][0] == found[2][1] == found[4][0]
    assert bf16 == found[4][1] != plain
    assert in_order != plain, "micro-batches that are added up in another order must be noticed"
    assert found[4][2] != plain, "sums over ranks in another order must be noticed"
