"""A loop that was written for one process reads what one process reads, or is told what to write."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pipeline_models import CASES
from tests.distributed.pipeline_plans import pipeline_plan
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.output_jobs"
LIMIT = 2e-5


@pytest.mark.exhaustive(sample="gather")
@pytest.mark.parametrize(
    "options",
    [
        {"dims": {"dp_shard": 2}},
        {"dims": {"tp": 2}},
        {"dims": {"dp_shard": 2}, "mode": "local"},
        {"dims": {"dp_shard": 2, "tp": 2}, "mode": "local"},
        {"dims": {"dp_shard": 2}, "outputs": "gather"},
        {"dims": {"dp_shard": 2}, "mode": "local", "outputs": "gather"},
    ],
    ids=str,
)
def test_metrics_read_the_outputs_of_one_device(pool: Pool, options: dict[str, Any]) -> None:
    size = math.prod(options["dims"].values())
    for errors in pool.run(f"{JOBS}:read", world_size=size, **options):
        assert max(errors.values()) <= LIMIT, errors


def test_where_no_block_moves_they_do_not(pool: Pool) -> None:
    for errors in pool.run(f"{JOBS}:read", world_size=2, dims={"dp_shard": 2}, planted=True):
        assert min(errors[name] for name in ("accuracy", "array", "list", "full")) > LIMIT, errors


def test_who_reads_nothing_moves_nothing(pool: Pool) -> None:
    assert pool.run(f"{JOBS}:unread", world_size=2, dims={"dp_shard": 2}) == [0, 0]


def test_who_reads_alone_is_told_and_disturbs_nobody(pool: Pool) -> None:
    first, second = pool.run(f"{JOBS}:read_alone", world_size=2, dims={"dp_shard": 2}, seconds=0.3)
    assert "1 of 2 ranks, among them 0, read the output logits of train call 1 of Speaker" in first["text"]
    assert "1 of 2 ranks, among them 0, read the value of a () tensor" in first["number"]
    assert "module.full(...)" in first["text"]
    assert first["waited"] < 5
    assert second["text"] == ""
    assert any("where other ranks read" in said["other"] for said in (first, second))
    assert max(said["after"] for said in (first, second)) <= LIMIT


@pytest.mark.parametrize("dims", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_numbers_of_gradients_and_weights_are_those_of_one_device(pool: Pool, dims: dict[str, int]) -> None:
    for errors in pool.run(f"{JOBS}:numbers", world_size=2, dims=dims):
        assert max(errors.values()) <= LIMIT, errors


def test_with_the_numbers_of_a_rank_they_are_not(pool: Pool) -> None:
    for errors in pool.run(f"{JOBS}:numbers", world_size=2, dims={"dp_shard": 2}, planted=True):
        names = ("norms", "norm", "text", "largest", "weights", "average", "copied", "listed", "array", "loaded")
        assert min(errors[name] for name in names) > LIMIT, errors


@pytest.mark.parametrize("dims", [{"dp_shard": 2}], ids=str)
def test_it_answers_as_the_plain_model(pool: Pool, tmp_path: Path, dims: dict[str, int]) -> None:
    for said in pool.run(f"{JOBS}:as_plain", world_size=2, dims=dims, folder=str(tmp_path)):
        errors = [said.pop(name) for name in ("state", "saved", "plain", "written")]
        assert max(errors) <= LIMIT, errors
        assert all(said.values()), said


def test_a_rank_of_stages_answers_with_those_of_all(pool: Pool) -> None:
    plan = pipeline_plan("gpt2", CASES["gpt2"].halves, "1f1b", 2, {}).to_json()
    for said in pool.run(f"{JOBS}:of_stages", world_size=2, name="gpt2", plan=plan):
        errors = [said.pop(name) for name in ("state", "plain", "logits", "full")]
        assert max(errors) <= LIMIT, errors
        assert all(said.values()), said
