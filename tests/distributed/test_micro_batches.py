"""A batch in parts gives the loss and the gradients of the whole batch, however unevenly its labels lie."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.micro_jobs"
CASES = [
    ("gpt2", {"dp_shard": 2, "tp": 2}, 4),
    ("llama", {"dp_replicate": 4}, 2),
    ("llama", {"tp": 2}, 4),
    ("encoder", {"dp_shard": 4}, 2),
    ("group norm", {"dp_shard": 2}, 2),
]


def _size(dims: dict[str, int]) -> int:
    size = 1
    for count in dims.values():
        size *= count
    return size


@pytest.mark.exhaustive(sample="group norm-{'dp_shard': 2}-2")
@pytest.mark.parametrize(("name", "dims", "parts"), CASES, ids=str)
def test_parts_equal_the_whole_batch(pool: Pool, name: str, dims: dict[str, int], parts: int) -> None:
    results = pool.run(f"{JOBS}:train", world_size=_size(dims), name=name, dims=dims, parts=parts)
    for errors in results:
        assert max(errors.values()) <= 1e-5, errors


def test_parts_that_divide_by_their_own_counts_are_noticed(pool: Pool) -> None:
    mutated = pool.run(f"{JOBS}:train", world_size=2, name="encoder", dims={"dp_shard": 2}, parts=2, own_counts=True)
    for errors in mutated:
        assert errors["loss"] > 1e-2
        assert errors["gradients"] > 1e-2


@pytest.mark.exhaustive(sample="{'dp_shard': 2}")
@pytest.mark.parametrize("dims", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_local_samples_are_cut_again(pool: Pool, dims: dict[str, int]) -> None:
    assert max(pool.run(f"{JOBS}:local_parts", world_size=_size(dims), dims=dims, parts=2)) <= 1e-5


def test_what_no_sync_held_comes_with_the_next_backward(pool: Pool) -> None:
    assert max(pool.run(f"{JOBS}:held_then_parts", world_size=2, dims={"dp_replicate": 2})) <= 1e-5


def test_dropout_of_parts_is_that_of_the_whole_batch(pool: Pool) -> None:
    alone = pool.run(f"{JOBS}:dropout_losses", world_size=1, dims=None, parts=1)[0]
    for dims, parts in (({"dp_shard": 2}, 2), ({"tp": 2}, 4)):
        for losses in pool.run(f"{JOBS}:dropout_losses", world_size=2, dims=dims, parts=parts):
            assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_verify_compares_parts_with_the_plain_model(pool: Pool, dropout: float) -> None:
    assert max(pool.run(f"{JOBS}:verified", world_size=2, dims={"dp_shard": 2}, parts=2, dropout=dropout)) <= 1e-5
