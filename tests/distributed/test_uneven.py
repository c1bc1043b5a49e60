"""Sizes that do not divide by the devices: the plan cuts unevenly or says what it does instead; numbers agree."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.parity_jobs import Parity
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

EMBEDDING = "transformer.wte.weight"


def check(pool: Pool, name: str, processes: int, cases: dict[str, dict[str, Any]]) -> dict[str, Parity]:
    """Run all cases, assert that loss and gradients agree on all ranks, and return what rank 0 found."""
    job = "tests.distributed.parity_jobs:uneven"
    results: list[dict[str, Parity]] = pool.run(job, world_size=processes, timeout=300.0, name=name, cases=cases)
    for found in results:
        for case, parity in found.items():
            assert parity.agreement.agrees, (case, parity.agreement)
    return results[0]


@pytest.mark.exhaustive
def test_a_vocabulary_of_50257_is_split_in_four_uneven_blocks(pool: Pool) -> None:
    cases = {axis: {"dims": {axis: 4}} for axis in ("tp", "dp_shard")}
    for parity in check(pool, "vocabulary 50257", 4, cases).values():
        assert parity.placements[EMBEDDING] == ["S(0)"]
        assert parity.replicated_share == 0.0


@pytest.mark.exhaustive
def test_a_batch_of_six_on_four_processes_says_what_it_does_instead(pool: Pool) -> None:
    cases = {"DDP": {"dims": {"dp_replicate": 4}}, "ZeRO-3": {"dims": {"dp_shard": 4}}}
    for case, parity in check(pool, "batch 6", 4, cases).items():
        axis = "dp_replicate" if case == "DDP" else "dp_shard"
        assert any(note.startswith(f"batch 6 does not divide by {axis}=4: ") for note in parity.notes), parity.notes
        assert all(note in parity.summary for note in parity.notes)


def test_five_heads_on_two_processes_say_what_they_do_instead(pool: Pool) -> None:
    parity = check(pool, "5 heads", 2, {"Megatron": {"dims": {"tp": 2}}})["Megatron"]
    assert any(note.startswith("5 attention heads do not divide by tp=2: ") for note in parity.notes), parity.notes
    assert parity.placements["transformer.h.0.mlp.c_fc.weight"] == ["S(1)"], "the rest of the model is still split"
