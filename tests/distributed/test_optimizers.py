"""Every optimizer of torch trains split parameters as it trains the plain model, or says that it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.optimizer_jobs import classes
from tests.distributed.pipeline_models import CASES
from tests.distributed.pipeline_plans import pipeline_plan
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOB = "tests.distributed.optimizer_jobs:after_steps"
REFUSED = {
    "Adafactor": "ConfigurationError: torch.optim.Adafactor cannot step here: it needs means of whole rows",
    "Rprop": "ConfigurationError: torch.optim.Rprop cannot step here: it mixes tensors of its own",
    "SparseAdam": "RuntimeError: SparseAdam does not support dense gradients",
}
"""SparseAdam refuses the plain model in the same words."""
TOLERANCE = {"Muon": 0.15, "LBFGS": 1e-3}
"""Muon orthogonalises in bf16: noise of 1e-3 in the gradients of the plain model moves its weights by 7 %. The line
searches of LBFGS amplify rounding."""


@pytest.mark.exhaustive(sample="{'tp': 2}")
@pytest.mark.parametrize("dims", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_all_of_torch(pool: Pool, dims: dict[str, int]) -> None:
    for found in pool.run(JOB, world_size=2, dims=dims, names=classes()):
        for name in classes():
            if name in REFUSED:
                assert str(found[name]).startswith(REFUSED[name]), (name, found[name])
            else:
                assert found[name] < TOLERANCE.get(name, 1e-4), (name, found[name])


def test_adafactor_keeps_whole_weights(pool: Pool) -> None:
    for found in pool.run(JOB, world_size=2, dims={"dp_replicate": 2}, names=["Adafactor"]):
        assert found["Adafactor"] < 1e-4


def test_without_the_guard_torch_fails_inside_of_itself(pool: Pool) -> None:
    """The fault: errors that name an operator of torch, and no mend."""
    names = ["Adafactor", "Rprop"]
    found: list[dict[str, Any]] = pool.run(JOB, world_size=2, dims={"tp": 2}, names=names, planted=True)
    for each in found:
        assert "ConfigurationError" not in str(each), each
        assert all(isinstance(error, str) and "aten" in error for error in each.values()), each


@pytest.mark.exhaustive
def test_stages_hold_a_part_of_what_lbfgs_needs(pool: Pool) -> None:
    words = "ConfigurationError: torch.optim.LBFGS cannot step here: its products need all parameters"
    plan = pipeline_plan("gpt2", CASES["gpt2"].halves, "1f1b", 2, {"dp_shard": 2}).to_json()
    for found in pool.run("tests.distributed.optimizer_jobs:in_stages", name="gpt2", plan=plan):
        assert found["LBFGS"].startswith(words), found
        assert found["AdamW"] == ""


def test_copies_are_rounded_alike_or_not_at_random(pool: Pool) -> None:
    job, copies = "tests.distributed.optimizer_jobs:rounded_at_random", {"dp_replicate": 2}
    assert pool.run(job, world_size=2, dims=copies) == [0.0, 0.0]
    assert min(pool.run(job, world_size=2, dims=copies, planted=True)) > 1e-4
    for found in pool.run(job, world_size=3, dims={"dp_shard": 3}):
        assert "RoundedSGD cannot step here: it rounds at random" in found
        assert "unequal blocks" in found
