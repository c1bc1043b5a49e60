"""Folding halves onto each other is one tree, however many of its levels lie across ranks."""

from __future__ import annotations

import pytest
import torch

from autopar.ops.folded_sums import folded_sum
from autopar.runtime.pipeline.gradient_fold import GradientFold
from autopar.schedules.folding_schedule import folding_order, folding_schedule, kept_sums


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_folds_over_ranks_and_then_over_their_parts_are_the_fold_of_all(ranks: int) -> None:
    shards = torch.randn(8, 200, generator=torch.Generator().manual_seed(0))
    count = len(shards) // ranks
    fold, most = GradientFold(), 0
    for part in folding_order(count):
        fold.add([folded_sum(shards.view(ranks, count, -1)[:, part]), None])
        most = max(most, len(fold._kept))
    total = fold.total()[0]
    assert torch.equal(total, folded_sum(shards))
    assert most == kept_sums(count) or count == 1
    assert not torch.equal(total, sum(shards[1:], start=shards[0])), "else any order would do"


def test_micro_batches_that_are_added_to_each_other_follow_each_other() -> None:
    assert folding_order(8) == (0, 4, 2, 6, 1, 5, 3, 7)
    assert str(folding_schedule(4)) == "0F0,0B0,0F2,0B2,0F1,0B1,0F3,0B3"
    assert folded_sum(torch.tensor([1.0, 2.0, 4.0])) == 7.0
