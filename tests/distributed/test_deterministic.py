"""Weights have equal bits behind some steps on 1, 2 and 4 processes, under DDP, ZeRO-1, ZeRO-3 and in bf16."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

RUNS: dict[int, list[dict[str, Any]]] = {
    1: [{"mutations": ["order"]}, {"precision": "bf16"}],
    2: [{"axis": "dp_shard", "zero_1": True}, {"axis": "dp_replicate", "precision": "bf16"}],
    4: [{"axis": "dp_shard", "mutations": ["sums"]}],
}


@pytest.mark.exhaustive
def test_bits_do_not_depend_on_the_number_of_processes(pool: Pool) -> None:
    found = {}
    for processes, runs in RUNS.items():
        job = "tests.distributed.deterministic_jobs:hashes"
        first, *others = pool.run(job, world_size=processes, runs=runs, processes=processes)
        assert all(other == first for other in others)
        found[processes] = first
    (plain, in_order), (bf16,) = found[1]
    (zero_1,), (bf16_of_two,) = found[2]
    ((zero_3, summed_in_order),) = found[4]
    assert plain == zero_1 == zero_3
    assert bf16 == bf16_of_two != plain
    assert in_order != plain, "micro-batches that are added up one after the other must be noticed"
    assert summed_in_order != plain, "ranks that are added up one after the other must be noticed"
