"""What a free search for a schedule is told of memory, and what it finds (`free_search.py`, which loads OR-tools)."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.schedules.actions import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """Bytes of one micro-batch: from F to the end of I, of which `until_weight` live on to the end of W."""

    saved: tuple[float, ...]
    until_weight: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A schedule with split backwards, its length, and what no schedule on these ranks falls below."""

    schedule: Schedule
    seconds: float
    bound_seconds: float
