"""Meetings: all ranks say a few numbers at one point of their program, and hear what the others said.

    meet([3, 5], "train call 7")         # [[3, 5], [3, 5], [3, 6], [3, 5]]: rank 2 says something else

A few small messages over a gloo group in which nothing else happens. So ranks that stand at different points of
their programs meet all the same, and can say so; in a collective of a step they would wait for each other. Who has
ended or does not come is named as in every collective (`collectives/lost_ranks.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.runtime.collectives.host_collectives import start_small_all_gather
from autopar.runtime.process_groups import world_size

_group_names: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
"""One group for all modules of a job, whose calls come in one order on all ranks."""


def meet(numbers: Sequence[int], occasion: str) -> list[list[int]]:
    """The `numbers` (64 bits each, as many on every rank) of all ranks, in rank order. occasion: for errors.

    The first meeting of a job makes the group. Raises RankLostError naming the ranks that do not come.
    """
    if world_size() == 1:
        return [list(numbers)]
    mine = torch.tensor(list(numbers), dtype=torch.int64)
    said: list[list[int]] = start_small_all_gather(mine, _group_name(), occasion).wait().tolist()
    return said


def _group_name() -> str:
    world = dist.group.WORLD
    assert world is not None
    if world not in _group_names:
        _group_names[world] = str(dist.new_group(backend="gloo").group_name)
    return _group_names[world]
