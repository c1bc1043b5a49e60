"""The schedule of logical shards: micro-batches in the order in which their gradients are folded.

    folding_schedule(4)      0F0,0B0,0F2,0B2,0F1,0B1,0F3,0B3
"""

from __future__ import annotations

from autopar.schedules.actions import Kind, PipeAction, Schedule

_PASSES: tuple[Kind, ...] = ("F", "B")


def folding_schedule(count: int) -> Schedule:
    """One stage on one rank, each micro-batch forward and backward before the next. count: a power of two."""
    return Schedule((tuple(PipeAction(0, kind, part) for part in folding_order(count) for kind in _PASSES),))


def folding_order(count: int) -> tuple[int, ...]:
    """The order of micro-batches in which those that are added to each other stand side by side: 0 2 1 3 of 4.

    The numbers with their bits reversed. count: a power of two."""
    order: tuple[int, ...] = (0,)
    while len(order) < count:
        order = (*(2 * place for place in order), *(2 * place + 1 for place in order))
    return order


def kept_sums(count: int) -> int:
    """How many sums of a fold of so many micro-batches are kept at most, while the next one is computed."""
    return count.bit_length() - 1
