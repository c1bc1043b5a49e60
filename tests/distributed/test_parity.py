"""Real models compute the same loss and gradients under every plan; the measure of that notices a planted fault."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.parity_jobs import Parity
from tests.distributed.plan_cases import KNOWN_PLANS, NO_REPLICATION, OWN_CHOICE, cases
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

TRANSFORMERS = ("gpt2", "llama")
MODELS = [("gpt2", 1), ("llama", 2), ("gpt2", 4), ("llama", 4), ("resnet", 4)]
"""(model, processes); the baselines are those of four processes, each with a transformer and a convolutional net."""
LARGEST_REPLICATED_SHARE = 0.05


@pytest.mark.exhaustive(sample="gpt2-1")
@pytest.mark.parametrize(("name", "processes"), MODELS)
def test_every_plan_computes_what_the_plain_model_computes(pool: Pool, name: str, processes: int) -> None:
    chosen: dict[str, dict[str, Any]] = cases(processes)
    if (name, processes) == ("llama", 4):
        chosen = {case: chosen[case] for case in (OWN_CHOICE, NO_REPLICATION, "ZeRO-3 x Megatron")}
    if NO_REPLICATION in chosen:
        chosen[NO_REPLICATION]["mesh"] = (processes,)  # on (2, 2) the proof of optimality takes a minute
    results: list[dict[str, Parity]] = pool.run(
        "tests.distributed.parity_jobs:zoo", world_size=processes, timeout=300.0, name=name, cases=chosen
    )
    for found in results:
        assert found.keys() == chosen.keys()
        for case, parity in found.items():
            assert parity.agreement.agrees, (case, parity.agreement)
    if name in TRANSFORMERS:
        for case in chosen.keys() - {OWN_CHOICE}:
            assert results[0][case].replicated_share < LARGEST_REPLICATED_SHARE, case
    assert (name, processes) not in (("gpt2", 4), ("resnet", 4)) or KNOWN_PLANS.keys() <= chosen.keys()


@pytest.mark.exhaustive
def test_a_step_that_recomputes_every_block_computes_what_the_plain_model_computes(pool: Pool) -> None:
    chosen: dict[str, dict[str, Any]] = {"recomputed": {"mesh": (2, 2), "recompute": "full", "mode": "fast"}}
    job = "tests.distributed.parity_jobs:zoo"
    results: list[dict[str, Parity]] = pool.run(job, world_size=4, timeout=300.0, name="llama", cases=chosen)
    for found in results:
        assert found["recomputed"].agreement.agrees, found["recomputed"].agreement
        assert "blocks in full" in found["recomputed"].summary


@pytest.mark.exhaustive
def test_a_gather_scaled_by_a_ten_thousandth_is_noticed(pool: Pool) -> None:
    job = "tests.distributed.parity_jobs:scaled_gather"
    assert all(agreement.agrees for agreement in pool.run(job, name="gpt2", factor=1.0))
    assert not any(agreement.agrees for agreement in pool.run(job, name="gpt2", factor=1.0001))
