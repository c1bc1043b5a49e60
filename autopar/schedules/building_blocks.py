"""The V-shaped schedules with controllable memory: one building block, repeated every six passes (arXiv 2405.15362).

A rank has two chunks, one on the way down the ranks (0), one on the way up (1). The block says when a micro-batch is
where: a pass of one unit on one rank, then `steps` units later on the next one:

    forward down, forward up, backward down, backward up        with steps 1 1 1 1 it is away for 4p units   (v-min)

The next micro-batch starts six units later, as long as F, I and W of two chunks take. Where two passes would meet on a
rank, a turn waits (at most six units). What a micro-batch keeps is proportional to the time it is away: of 1F1B's
memory v-min has a third, v-half (2 1 2 1) a half, zb-v (4 2 4 2) all of it and no bubble.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

from autopar.schedules.orders import Orders, merged

BlockSteps: TypeAlias = tuple[int, int, int, int]
"""Units from a rank to the next: forward on the way down and up, backward on the way down and up."""

BLOCKS: Sequence[BlockSteps] = ((4, 2, 4, 2), (2, 1, 2, 1), (1, 1, 1, 1))
"""Of zb-v, v-half and v-min."""
PERIOD = 6
ROOM = 2
"""Chunks more than the block's own memory, for W that wait until the rank would stand still."""


def block_orders(num_ranks: int, micro_batches: int, steps: BlockSteps, limit: float = math.inf) -> Orders:
    """The order in which the repeated block has the passes of every rank.

    Where the block keeps more than `limit` chunks, a smaller one of `BLOCKS` takes its place.
    """
    fitting = (block for block in BLOCKS if sum(block) <= sum(steps) and own_chunks(num_ranks, block) <= limit)
    steps = next(fitting, steps)
    ranks = []
    for rank, starts in enumerate(zip(*_starts(num_ranks, steps), strict=True)):
        stages = (rank, 2 * num_ranks - 1 - rank, 2 * num_ranks - 1 - rank, rank)
        passes = [
            (start + PERIOD * index, kind, (stage, index))
            for index in range(micro_batches)
            for start, kind, stage in zip(starts, "FFBB", stages, strict=True)
        ]
        ranks.append(merged([(kind, step) for _, kind, step in sorted(passes)]))
    return Orders(ranks=ranks, limit=min(own_chunks(num_ranks, steps) + ROOM, 2 * num_ranks))


def own_chunks(num_ranks: int, steps: BlockSteps) -> int:
    """Chunks that a rank keeps at once in the repeated block."""
    return math.ceil(num_ranks * sum(steps) / PERIOD)


@lru_cache(maxsize=64)
def _starts(num_ranks: int, steps: BlockSteps) -> Sequence[Sequence[int]]:
    """Per pass, the unit at which each rank starts it in the first block; the shortest block without a clash."""
    places = range(num_ranks)
    blocks = []
    for turns in itertools.product(range(1, PERIOD + 1), repeat=3):
        down = [steps[0] * place for place in places]
        up = [down[-1] + turns[0] + steps[1] * (num_ranks - 1 - place) for place in places]
        back_down = [up[0] + turns[1] + steps[2] * place for place in places]
        back_up = [back_down[-1] + turns[2] + steps[3] * (num_ranks - 1 - place) for place in places]
        if all(len({at % PERIOD for at in starts}) == 4 for starts in zip(down, up, back_down, back_up, strict=True)):
            blocks.append((back_up[0], turns, (down, up, back_down, back_up)))
    return min(blocks)[2]
