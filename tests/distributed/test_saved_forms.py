"""What is packed loses no bit on any mesh, and what is rounded is rounded alike on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.pool import Pool
from tests.distributed.saved_form_jobs import Packed

pytestmark = pytest.mark.distributed

JOB = "tests.distributed.saved_form_jobs:parity"
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO-3": (2, {"dims": {"dp_shard": 2}}),
    "Megatron": (2, {"dims": {"tp": 2}}),
    "ZeRO-3 x Megatron": (4, {"dims": {"dp_shard": 2, "tp": 2}}),
    "stages": (2, {"dims": {"pp": 2}, "micro_batches": 2, "schedule": "1f1b"}),
    "micro-batches": (2, {"dims": {"dp_shard": 2}, "micro_batches": 2}),
}


def run(pool: Pool, form: str, ranks: int, arguments: dict[str, Any]) -> list[Packed]:
    found: list[Packed] = pool.run(JOB, world_size=ranks, timeout=300.0, form=form, arguments=arguments)
    return found


@pytest.mark.exhaustive(sample="ZeRO-3 x Megatron")
@pytest.mark.parametrize("case", CASES)
def test_bits_lose_nothing(pool: Pool, case: str) -> None:
    for rank in run(pool, "mask", *CASES[case]):
        assert rank.off == 0.0
        assert rank.saved_packed <= rank.saved_whole


@pytest.mark.exhaustive(sample="ZeRO-3 x Megatron-4bit")
@pytest.mark.parametrize(
    ("case", "form"), [("ZeRO-3 x Megatron", "4bit"), ("ZeRO-3", "2bit"), ("Megatron", "8bit"), ("Megatron", "2bit")]
)
def test_rounding_is_the_same_on_one_rank_and_on_several(pool: Pool, case: str, form: str) -> None:
    """What a value next to a step is rounded to may follow from the last bit of a sum: few are."""
    (alone,) = run(pool, form, 1, {})
    rank = run(pool, form, *CASES[case])[0]
    assert alone.off > 1e-3
    assert rank.saved_packed < rank.saved_whole
    for name, gradient in alone.gradients.items():
        error = float((rank.gradients[name] - gradient).norm() / gradient.norm())
        assert error < 0.02 * alone.off, (name, error)


@pytest.mark.exhaustive(sample="micro-batches")
@pytest.mark.parametrize("case", ["stages", "micro-batches"])
def test_parts_of_a_batch_are_rounded_by_chance_too(pool: Pool, case: str) -> None:
    for rank in run(pool, "8bit", *CASES[case]):
        assert 1e-5 < rank.off < 0.03
        assert all(torch.isfinite(gradient).all() for gradient in rank.gradients.values())
