"""The schedule of logical shards: micro-batches in the order in which their gradients are folded.

    folding_schedule(4)      0F0,0B0,0F2,0B2,0F1,0B1,0F3,0B3
"""

from __future__ import annotations

from autopar.plans.logical_shards import folding_order
from autopar.schedules.actions import Kind, PipeAction, Schedule

_PASSES: tuple[Kind, ...] = ("F", "B")


def folding_schedule(count: int) -> Schedule:
    """One stage on one rank, each micro-batch forward and backward before the next. count: a power of two."""
    return Schedule((tuple(PipeAction(0, kind, part) for part in folding_order(count) for kind in _PASSES),))
