"""Beats: what a rank says every few seconds, and what another one concludes from it.

    heard = Heard(); heard.hear(beat, elapsed=5.0)     # the count grew: heard.silent_seconds == 0.0
    judge(mine, {1: heard}, limit=60.0)                # None, or the Verdict: rank 1 is silent for 60 s (host ...)

Late is told from different. A rank that beats may be late for as long as it likes: compiling and saving take minutes,
and code between calls is the user's; that is a line in the log (`late`). What ends a job is certain: a rank that says
nothing any more, one that has ended before the phase that another is in, one whose phase an error ended while another
is still inside, and two that are inside of different phases where all ranks enter the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from autopar.runtime.collectives.progress import Place

FAILED_SHARE = 1 / 6
"""Of the limit: so long others may still be on their way out of a phase that an error ended on one rank."""
PATIENCE: Mapping[str, float] = {"join": 10.0, "compile": 30.0, "save": 30.0, "load": 30.0}
"""Limits that a phase may take before the log says so; others: `USUAL_PATIENCE`. A job whose ranks do not all join in
that time ends."""
USUAL_PATIENCE = 5.0


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """The count-th beat of a rank. ended: its last one, as it leaves the job."""

    count: int
    place: Place
    host: str
    process: int
    ended: bool = False


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why the job ends. lost: a rank is gone or stopped (RankLostError); else ranks differ (RankMismatchError)."""

    lost: bool
    message: str


Conflict = Literal["", "failed", "different"]


@dataclass(slots=True)
class Heard:
    """What another rank said last, and for how long it has said nothing new, by the clock of the one that listens."""

    beat: Beat | None = None
    silent_seconds: float = 0.0
    conflict: tuple[Conflict, int] = ("", 0)
    conflict_seconds: float = 0.0

    def hear(self, beat: Beat | None, elapsed: float) -> None:
        """Take what the store has of the rank now (None: nothing yet), `elapsed` seconds after it was last asked."""
        old, self.beat = self.beat, beat
        is_news = beat is None or old is None or beat.count != old.count
        self.silent_seconds = 0.0 if is_news else self.silent_seconds + elapsed

    def compare(self, mine: Place, elapsed: float) -> None:
        """Note for how long this rank and the other have been in conflict in one phase."""
        found = ("" if self.beat is None else conflict(mine, self.beat.place), mine.entries)
        self.conflict_seconds = self.conflict_seconds + elapsed if found == self.conflict else 0.0
        self.conflict = found

    def is_lost(self, mine: Place, limit: float) -> bool:
        """Whether it has been silent for the limit, and should not be: who ended in order is missed in later phases."""
        if self.beat is None or self.silent_seconds < limit:
            return False
        return not self.beat.ended or (mine.inside and self.beat.place.entries < mine.entries)


def conflict(mine: Place, other: Place) -> Conflict:
    """What keeps this rank, inside of a phase, from ever leaving it: see the module docstring."""
    if not mine.inside:
        return ""
    if other.failed[0] == mine.entries:
        return "failed"
    return "different" if other.inside and other.entries == mine.entries and other.phase != mine.phase else ""


def watched(rank: int, world: int, heard: Mapping[int, Heard], limit: float) -> list[int]:
    """The ranks that `rank` listens to: the next one, and where that is ended or silent the one behind it, and so on:
    all have somebody who listens, at the cost of one question a beat."""
    found = []
    for step in range(1, world):
        found.append((rank + step) % world)
        other = heard.get(found[-1])
        if other is None or other.beat is None or not (other.beat.ended or other.silent_seconds > limit / 2):
            break
    return found


def judge(rank: int, mine: Place, heard: Mapping[int, Heard], limit: float) -> Verdict | None:
    """What `rank` at place `mine` concludes from the others; None as long as the job may go on."""
    lost = {other: said for other, said in heard.items() if said.is_lost(mine, limit)}
    if lost:
        silent = {o: said for o, said in heard.items() if said.beat and not said.beat.ended}
        behind = {other: said for other, said in silent.items() if said.silent_seconds > limit / 2}
        return Verdict(lost=True, message=_lost_message(rank, mine, {**behind, **lost}, limit))
    for other, said in heard.items():
        allowed = limit * FAILED_SHARE if said.conflict[0] == "failed" else limit
        if said.conflict[0] and said.conflict_seconds >= allowed and said.beat is not None:
            return Verdict(lost=False, message=_conflict_message(rank, mine, other, said.beat.place, said.conflict[0]))
    return None


def _lost_message(rank: int, mine: Place, lost: Mapping[int, Heard], limit: float) -> str:
    described = "; ".join(_described(other, said) for other, said in sorted(lost.items()))
    return (
        f"{described}; rank {rank} is {mine.text()}. Its own output, and the machine's log, say what stopped it; a "
        f"process that may stand still for longer needs a larger AUTOPAR_HEARTBEAT (it is {limit:g} s, 0: none)"
    )


def _described(rank: int, said: Heard) -> str:
    assert said.beat is not None
    what = "has ended" if said.beat.ended else f"is silent for {said.silent_seconds:.0f} s"
    return f"rank {rank} {what} (process {said.beat.process} on {said.beat.host}): it was {said.beat.place.text()}"


def _conflict_message(rank: int, mine: Place, other: int, place: Place, kind: Conflict) -> str:
    if kind == "failed":
        return (
            f"rank {other} failed where rank {rank} did not: {place.failed[1]}. Rank {rank} is {mine.text()}, and what "
            f"it waits for does not come; rank {other} is {place.text()}"
        )
    return (
        f"ranks {rank} and {other} do different things, and wait for each other: rank {rank} is {mine.text()}, rank "
        f"{other} is {place.text()}. All ranks call the module, backward, save and load in the same order"
    )


def late(mine: Place, limit: float) -> float:
    """After how many seconds in this phase the log says that it is long; infinity where this rank is in none."""
    return PATIENCE.get(mine.phase, USUAL_PATIENCE) * limit if mine.inside else float("inf")


def late_message(mine: Place, heard: Mapping[int, Heard], others: Collection[int]) -> str:
    """Where this rank is, and where those that it listens to are."""
    said = [(other, heard[other].beat) for other in others if other in heard]
    places = [f"rank {other} is {'not compiling yet' if beat is None else beat.place.text()}" for other, beat in said]
    return f"this rank is {mine.text()}; all ranks beat; {'; '.join(places)}"
