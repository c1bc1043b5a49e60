"""A collective moves a block for each of its places: one more or less is an error, not a place left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.runtime.collectives.exchanged import gathered


class Posted:
    """A communicator of three places that notes what is posted, on the place in the middle."""

    place, size = 1, 3

    def __init__(self) -> None:
        self.sent: dict[int, torch.Tensor] = {}
        self.received: dict[int, torch.Tensor] = {}

    def exchange(self, tag: int, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
        self.sent, self.received = sent, received


def started(blocks: list[torch.Tensor]) -> Posted:
    communicator: Any = Posted()
    next(gathered(communicator, 0, (0, 1, 2), torch.ones(2), blocks))
    return communicator


def test_a_gather_sends_its_own_block_to_every_other_place_and_takes_theirs() -> None:
    blocks = [torch.zeros(2) for _ in range(3)]
    posted = started(blocks)
    assert {place: block.tolist() for place, block in posted.sent.items()} == {0: [1.0, 1.0], 2: [1.0, 1.0]}
    assert posted.received == {0: blocks[0], 2: blocks[2]}
    assert blocks[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("count", [2, 4])
def test_a_gather_into_fewer_or_more_blocks_than_places_is_refused_before_anything_is_sent(count: int) -> None:
    with pytest.raises(ValueError, match="zip"):
        started([torch.zeros(2) for _ in range(count)])
