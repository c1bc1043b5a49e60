"""In flight: how many micro-batches every rank of a pipeline keeps at once, counted on the schedule itself.

    in_flight("1f1b", 4, 8)     (4, 3, 2, 1)        ranks left
    in_flight("gpipe", 4, 8)    (8, 8, 8, 8)        all of them
    in_flight("zb-h2", 4, 8)    (7, 7, 7, 7)        until W has run

A chunk counts from its forward until its whole backward, or its W; those that a step leaves to the next count in both.
Orders of `TIMED_FAMILIES` follow from the times of the model, so their limit counts.
"""

from __future__ import annotations

from functools import lru_cache

from autopar.schedules.actions import Schedule
from autopar.schedules.list_scheduler import FAMILIES, TIMED_FAMILIES, build_schedule

PERIODS = 4
"""A schedule is steady behind so many micro-batches per rank and chunk: more do not change what is in flight."""


@lru_cache(maxsize=256)
def in_flight(family: str, num_ranks: int, micro_batches: int, chunks: int = 1) -> tuple[int, ...]:
    """Chunks kept at once, per rank. Raises ConfigurationError for an unknown family."""
    if family in TIMED_FAMILIES:
        slope = FAMILIES[family].slope or 0
        return (min(micro_batches, 1 + slope * (num_ranks - 1)),) * num_ranks
    counted = micro_batches
    if family in FAMILIES and FAMILIES[family].slope is not None:
        counted = min(micro_batches, PERIODS * num_ranks * max(2, chunks) + micro_batches % (2 * num_ranks))
    return most_kept(build_schedule(family, num_ranks, counted, chunks))


def kept_by_stage(schedule: Schedule, *, until_weights: bool = False) -> tuple[int, ...]:
    """For each stage, the most micro-batches between F and their B or I; until_weights: their B or W."""
    frees = {"F": 1, "B": -1, "I": 0 if until_weights else -1, "W": -1 if until_weights else 0}
    most, live = [0] * schedule.num_stages, [0] * schedule.num_stages
    for actions in schedule.ranks:
        for action in actions:
            live[action.stage] += frees[action.kind] if action.micro_batch >= 0 else 0
            most[action.stage] = max(most[action.stage], live[action.stage])
    return tuple(most)


def most_kept(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the most chunks between F and their B or W."""
    found = []
    for actions in schedule.ranks:
        live = most = sum(action.micro_batch < 0 for action in actions)
        for action in actions:
            live += {"F": 1, "I": 0}.get(action.kind, -1)
            most = max(most, live)
        found.append(most)
    return tuple(found)
