"""Is a schedule one that can run, computes everything once, and keeps its promise of memory?

Every micro-batch needs, on every stage, one F, then either one B, or one I and behind it one W. Every input that an
action waits for must be sent by an action that can come first (no deadlock), and no rank may hold more micro-batches
between F and the end of their backward than its cap. A backward that the step before left over (`0B-1`) stands for the
one that this step leaves to the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.errors import ConfigurationError
from autopar.schedules.actions import PipeAction, Schedule

_WHOLE = (("F", "B"), ("F", "I", "W"))
"""What a stage may do with a micro-batch, in this order."""
_LEFT_OVER = ["B'", "F"]
"""Or, in any order: its forward, and the backward of the one at its place in the step before."""


def check_schedule(schedule: Schedule, caps: Sequence[int] | None = None) -> None:
    """Raise ConfigurationError with the first fault found; `caps`: chunks in flight allowed on each rank."""
    _check_passes(schedule)
    runnable_order(schedule)
    if caps is not None:
        for rank, (most, cap) in enumerate(zip(most_in_flight(schedule), caps, strict=True)):
            if most > cap:
                raise ConfigurationError(f"rank {rank} holds {most} micro-batches at once; its cap is {cap}")


def runnable_order(schedule: Schedule) -> list[tuple[int, PipeAction]]:
    """(rank, action) in an order in which every action stands behind what it needs.

    Raises ConfigurationError where ranks wait for each other, with the actions at which they stand.
    """
    position = [0] * len(schedule.ranks)
    done: set[tuple[int, str, int]] = set()
    order: list[tuple[int, PipeAction]] = []
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needed = schedule.awaited(action)
                if needed is not None and (*needed, action.micro_batch) not in done:
                    break
                if action.kind != "W":
                    done.add((action.stage, "F" if action.kind == "F" else "gradient", action.micro_batch))
                order.append((rank, action))
                position[rank] += 1
                moved = True
    stuck = [str(actions[at]) for at, actions in zip(position, schedule.ranks, strict=True) if at < len(actions)]
    if stuck:
        raise ConfigurationError(f"deadlock: ranks wait for each other at {', '.join(stuck)}")
    return order


def most_in_flight(schedule: Schedule) -> list[int]:
    """For each rank, the most chunks that stand between F and the end of their backward (B or I) at once."""
    most = []
    for actions in schedule.ranks:
        held = peak = sum(action.micro_batch < 0 and action.kind in "BI" for action in actions)
        for action in actions:
            held += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
            peak = max(peak, held)
        most.append(peak)
    return most


def _check_passes(schedule: Schedule) -> None:
    holders = schedule.holders
    passes: dict[tuple[int, int], tuple[str, ...]] = defaultdict(tuple)
    for action in schedule:
        if action.micro_batch < -schedule.micro_batches:
            raise ConfigurationError(f"{action}: the step before has {schedule.micro_batches} micro-batches only")
        left_over = "'" if action.micro_batch < 0 else ""
        passes[action.stage, action.micro_batch % schedule.micro_batches] += (action.kind + left_over,)
    for stage in range(len(holders)):
        for micro_batch in range(schedule.micro_batches):
            found = passes[stage, micro_batch]
            if found not in _WHOLE and sorted(found) != _LEFT_OVER:
                raise ConfigurationError(
                    f"stage {stage} takes micro-batch {micro_batch} through {' '.join(found) or 'nothing'}; "
                    "it must be F B or F I W"
                )
