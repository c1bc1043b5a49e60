"""Logical shards: what `deterministic=` says, and in which order shards are added up.

    deterministic=False    nothing            deterministic=True    equal bits for equal plans and seeds
    deterministic=8        equal bits on 1, 2, 4 and 8 processes: the batch is 8 shards, whoever computes them

Shard r * count + i is micro-batch i of rank r. Sums over shards are one tree, the fold (`ops/folded_sums.py`): ranks
fold each of their micro-batches, then the micro-batches are folded; both fold halves onto each other, so that it does
not matter how many levels of the tree lie across ranks.
"""

from __future__ import annotations

from typing import TypeAlias

Deterministic: TypeAlias = bool | int


def num_shards(deterministic: Deterministic) -> int:
    """The number of logical shards of a batch; 0 where the batch is not cut into any."""
    return 0 if isinstance(deterministic, bool) else deterministic


def is_power_of_two(number: int) -> bool:
    """1, 2, 4, 8, ..."""
    return number > 0 and number & (number - 1) == 0
