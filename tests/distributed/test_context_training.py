"""A sequence that is cut over ranks trains like one device: steps, outputs in order, parts, stages, checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.context_training_jobs"
CASES: dict[str, dict[str, Any]] = {
    "ring": {"dims": {"cp": 2}, "cp": "ring", "zigzag": True},
    "ring in uneven blocks": {"dims": {"cp": 2}, "cp": "ring", "length": 15},
    "uneven micro-batches": {"dims": {"cp": 2, "tp": 2}, "cp": "ring", "parts": 2, "length": 15},
    "uneven stages": {"dims": {"pp": 2, "cp": 2}, "cp": "ring", "parts": 2, "length": 15},
    "ulysses": {"dims": {"cp": 2}, "cp": "ulysses"},
    "gather": {"dims": {"cp": 2}, "cp": "gather"},
    "ring of heads": {"dims": {"cp": 2, "cp_inner": 2}, "cp": "ring"},
    "own samples": {"dims": {"dp_shard": 2, "cp": 2}, "cp": "ring", "mode": "local", "zigzag": True},
    "micro-batches": {"dims": {"cp": 2, "tp": 2}, "cp": "ring", "parts": 2, "zigzag": True},
    "stages": {"dims": {"pp": 2, "cp": 2}, "cp": "ring", "parts": 2},
}


def _ranks(dims: dict[str, int]) -> int:
    return math.prod(dims.values())


@pytest.mark.exhaustive(sample=["own samples", "ring in uneven blocks"])
@pytest.mark.parametrize("name", CASES)
def test_training_equals_one_device(pool: Pool, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    path = str(tmp_path / "checkpoint") if name in ("own samples", "ulysses") else ""
    for errors in pool.run(f"{JOBS}:train", world_size=_ranks(case["dims"]), path=path, **case):
        zigzag, ring = errors.pop("zigzag"), errors.pop("ring")
        assert ring == (case["cp"] == "ring")
        assert zigzag == case.get("zigzag", False)
        assert max(errors.values()) < 2e-5, errors


def test_outputs_in_the_order_of_ranks_are_noticed(pool: Pool) -> None:
    errors = pool.run(f"{JOBS}:train", world_size=2, dims={"cp": 2}, cp="ring", zigzag=True, planted=True)[0]
    assert errors["step 0: logits"] > 1e-2
    assert errors["step 0: loss"] < 2e-5


@pytest.mark.exhaustive
def test_verify_runs_the_ring(pool: Pool) -> None:
    for dims, parts in (({"cp": 2}, 1), ({"cp": 2}, 2)):
        assert max(pool.run(f"{JOBS}:verified", world_size=2, dims=dims, cp="ring", parts=parts)) < 1e-4
