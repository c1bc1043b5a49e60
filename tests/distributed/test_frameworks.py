"""Training loops of other packages, and plain ones in every precision and with every optimizer, on two processes beside
one without autopar; a few rows of `python -m benchmarks.frameworks`, which has all of them."""

from __future__ import annotations

import pytest

from benchmarks.frameworks.row_job import NEEDS, rows_of
from benchmarks.frameworks.row_runner import pool_for, ran

CHOSEN = {
    "accelerate": ("accumulate and clip", "a short last batch", "resuming sharded parameters", "mixed precision fp16"),
    "trainer": ("gradient accumulation", "eval_strategy", "resume under another plan"),
    "lightning": ("resume", "a loss outside of the model, AdamW", "two optimizers"),
    "fabric": ("no_backward_sync", "save and load"),
    "peft": ("DoRA, tensor parallelism", "save_adapter"),
    "precision": ("GradScaler, unscale_ and clip", "the scaler's state saved", "bf16 weights, fp32 sums"),
    "optimizers": ("NAdam, sharded", "Adafactor, tensor parallelism", "LBFGS, two stages"),
    "torchao": ("AdamW8bit, sharded", "stochastic rounding, a weight of two stages"),
}


@pytest.mark.exhaustive(sample="precision")
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("framework", CHOSEN)
def test_a_framework_trains_on_two_processes_as_on_one(framework: str) -> None:
    for package in NEEDS[framework][1]:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'autopar[{package}]'")
    rows = {row.feature: row for row in rows_of(framework)}
    pool = pool_for([framework])
    found = [ran(rows[feature], pool) for feature in CHOSEN[framework]]
    assert not [f"{row.name}: {row.verdict}, {row.says}" for row in found if not row.good]
