"""A rank that passes or does something else than the others is named on every rank, at once."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.call_jobs"

SAID = {
    "right": "",
    "batch": "rank 1 passed other values of tokens, labels than the others: every rank passes the same whole batch",
    "labels": "rank 1 passed other values of labels than",
    "shape": "rank 1 passed (3, 6) as tokens, the others (8, 6)",
    "dtype": "rank 1 passed torch.int32 as dtype of tokens, the others torch.int64",
    "structure": "rank 1 passed nothing as tokens, the others (8, 6)",
    "eval": "rank 1 started eval call 2 of TiedModel, the others train call 2 of TiedModel: all ranks make",
    "mode of a part": "rank 1 has norm as modules in the other mode, the others none",
    "Python state": "rank 1 has 2 (norm.eps) as Python state, the others 1 (as it was captured)",
    "no_grad": "rank 1 started train call 2 of TiedModel without gradients, the others train call 2 of TiedModel",
    "no backward": "rank 1 started train call 3 of TiedModel, the others the backward pass of train call 2 of Tied",
    "no_sync": "rank 1 started the backward pass of train call 3 of TiedModel inside no_sync(), the others the back",
    "no optimizer step": "rank 1 had updated weights 0 times, the others 1",
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_ranks_hear_what_each_said(pool: Pool, ranks: int) -> None:
    expected = [[[rank, number, -(1 << 63)] for rank in range(ranks)] for number in range(2)]
    assert pool.run(f"{JOBS}:met", world_size=ranks) == [expected] * ranks


def test_what_one_rank_does_is_named_by_all(pool: Pool) -> None:
    for said in pool.run(f"{JOBS}:one_rank_differs", world_size=3, dims={"dp_shard": 3}):
        assert said.keys() == SAID.keys()
        assert {name: text for name, text in said.items() if SAID[name] not in text} == {}
        assert said["right"] == ""


def test_another_batch_is_found_at_the_next_comparison(pool: Pool) -> None:
    for found in pool.run(f"{JOBS}:other_batches", world_size=2, check_calls=6, dims={"dp_replicate": 2}, calls=7):
        assert [bool(said) for said, _ in found] == [False] * 6 + [True]
        assert "in train call 7 of TiedModel rank 1 passed other values" in found[6][0]
    for found in pool.run(f"{JOBS}:other_batches", world_size=2, check_calls=0, dims={"dp_replicate": 2}, calls=7):
        assert {said for said, _ in found} == {""}
        assert abs(found[6][1] - found[0][1]) > 1e-3, "the loss of no batch at all"


def test_ranks_of_one_shard_pass_the_same_samples(pool: Pool) -> None:
    for said, loss, plain, warnings in pool.run(f"{JOBS}:sampled", by="shard"):
        assert said == ""
        assert loss == pytest.approx(plain, rel=1e-5)
        assert warnings == []
    for said, *_ in pool.run(f"{JOBS}:sampled", by="rank"):
        assert "ranks 0, 1 passed different values of tokens, labels, though each of them has part 0 of the 2" in said
        assert "num_replicas" in said
    for said, loss, plain, _ in pool.run(f"{JOBS}:sampled", by="rank", check_calls=0):
        assert said == ""
        assert abs(loss - plain) > 1e-3, "half of the samples are not trained on"


def test_equal_parts_are_a_warning_of_the_first_rank(pool: Pool) -> None:
    results = pool.run(f"{JOBS}:sampled", by="same")
    assert [said for said, *_ in results] == [""] * 4
    assert [len(warnings) for *_, warnings in results] == [1, 0, 0, 0]
    assert "all 2 parts of the batch are equal" in results[0][-1][0]


@pytest.mark.exhaustive(sample="2-rank")
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (1, "when train call 2 of TiedModel started, rank 1 had updated weights 0 times, rank 0 1"),
        (2, "rank 1 started train call 2 of TiedModel, rank 0 the backward pass of train call 1 of TiedModel"),
    ],
)
def test_what_one_rank_leaves_out_shows_before_the_next_step(pool: Pool, parts: int, expected: str) -> None:
    for said, _ in pool.run(f"{JOBS}:weights_apart", world_size=2, check_calls=50, parts=parts):
        assert expected in said
    said, difference = pool.run(f"{JOBS}:weights_apart", world_size=2, check_calls=0, parts=parts)[1]
    assert said == ""
    assert difference > 1e-3, "without a word the weights of one rank are others"
