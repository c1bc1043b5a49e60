"""Mesh search: best first over candidates that become known in stages, so that hopeless ones are dropped unsolved.

    candidate    bound after stage 1    objective
    (8,)         78.6                   dropped: nothing on it is under 78.6
    (2, 4)       75.0                   77.1
    (2, 2, 2)    76.0                   76.5        the best

Each of the `Candidates` is an iterator of `Stage`s: each costs more and knows more, the last one has the result.
`best_first` always refines the candidate with the lowest bound, of equal ones (within `LIMITS.bound_rounding`: the last
bits tell nothing) the most promising, then the first. Let u be the smallest objective of the finished ones and b(c) the
bound of a candidate: once u <= b(c) for all others, u is the optimum over all of them. min(u, min b) is a valid bound
whenever the search ends, also at its time limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from autopar.planner.problem.limits import LIMITS

Key = TypeVar("Key")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Generic[Key, Result]):
    """What is known of a candidate after a stage. bound: no result of it has a smaller objective; implied: bounds of
    other candidates that follow. after: a candidate whose result would help the next stage; it is refined first."""

    bound: float
    objective: float = math.inf
    result: Result | None = None
    implied: Mapping[Key, float] = field(default_factory=dict)
    after: Key | None = None


class Candidates(Protocol[Key, Result]):
    """What a search knows of its candidates; what one stage shows may change the answers about others."""

    def stages(self, key: Key) -> Iterator[Stage[Key, Result]]:
        """What becomes known of a candidate, step by step."""

    def refusal(self, key: Key) -> str:
        """Asked before the first stage of a candidate: a reason leaves it out, "" does not."""

    def estimate(self, key: Key) -> tuple[float, ...]:
        """An estimate of the objective, which proves nothing: among candidates with one bound, the smallest comes
        first."""


State = Literal["untried", "open", "finished", "failed", "refused"]


@dataclass(slots=True, eq=False)
class Entry(Generic[Key, Result]):
    """A candidate and how far it came. `open` when the search ends: dropped by its bound, or by the time limit."""

    key: Key
    stages: Iterator[Stage[Key, Result]]
    state: State = "untried"
    bound: float = 0.0
    objective: float = math.inf
    result: Result | None = None
    error: Exception | None = None
    """Why it failed: of one of the types that `best_first` was told to expect."""
    refusal: str = ""
    """Why it was not tried."""
    after: Key | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOutcome(Generic[Key, Result]):
    """All candidates in their order, the best of the finished ones (None: none finished), and whether time ended it."""

    entries: tuple[Entry[Key, Result], ...]
    best: Entry[Key, Result] | None
    timed_out: bool

    @property
    def bound(self) -> float:
        """No result of any candidate has a smaller objective; candidates that failed keep the bound they had."""
        return min((min(entry.bound, entry.objective) for entry in self.entries), default=math.inf)


def best_first(
    keys: Sequence[Key],
    candidates: Candidates[Key, Result],
    *,
    seconds: float,
    failures: tuple[type[Exception], ...] = (),
    clock: Callable[[], float] = time.monotonic,
    floors: Mapping[Key, float] | None = None,
    below: float = math.inf,
) -> MeshOutcome[Key, Result]:
    """Refine candidates, lowest bound first, until the best finished one is proven or `seconds` have passed.

    When time is up and nothing is finished, the search goes on among the candidates that it has opened until one is:
    a late result is better than none. failures: exceptions by which a stage says that its candidate has no result.
    floors: bounds that are known already. below: only results with a smaller objective count.
    """
    entries = [Entry(key, candidates.stages(key), bound=(floors or {}).get(key, 0.0)) for key in keys]
    by_key = {entry.key: entry for entry in entries}
    end = clock() + seconds
    best: Entry[Key, Result] | None = None
    timed_out = False
    while True:
        timed_out = timed_out or clock() > end
        reach = below if best is None else _reach(best)
        entry = _next(entries, reach, timed_out, candidates)
        if entry is None:
            return MeshOutcome(
                entries=tuple(entries), best=best, timed_out=timed_out and bool(_hopeful(entries, reach))
            )
        if entry.state == "untried":
            entry.refusal = candidates.refusal(entry.key)
            entry.state = "refused" if entry.refusal else "open"
        if entry.state == "open":
            for other, bound in _refine(entry, failures).items():
                by_key[other].bound = max(by_key[other].bound, bound)
        if entry.state == "finished" and entry.objective < (below if best is None else best.objective):
            best = entry


def _next(
    entries: list[Entry[Key, Result]],
    reach: float,
    timed_out: bool,
    candidates: Candidates[Key, Result],
) -> Entry[Key, Result] | None:
    """The candidate to refine: the lowest bound among those below `reach`; None to stop."""
    hopeful = _hopeful(entries, reach)
    if timed_out:
        if math.isfinite(reach):
            return None
        opened = [entry for entry in hopeful if entry.state == "open"]
        tried = any(entry.state not in ("untried", "refused") for entry in entries)
        hopeful = opened if tried else hopeful
    lowest = min((entry.bound for entry in hopeful), default=math.inf)
    equal = [entry for entry in hopeful if entry.bound <= lowest * (1 + LIMITS.bound_rounding)]
    chosen = min(equal, key=lambda entry: candidates.estimate(entry.key), default=None)
    first = (
        None if chosen is None or chosen.after is None else {entry.key: entry for entry in hopeful}.get(chosen.after)
    )
    return first or chosen


def _reach(best: Entry[Key, Result]) -> float:
    """What the bound of another candidate must be below to be worth refining."""
    gap = 1.0 - best.bound / best.objective if best.objective else 0.0
    return best.objective * (1 - max(LIMITS.bound_rounding, min(gap, LIMITS.certified_gap)))


def _hopeful(entries: list[Entry[Key, Result]], reach: float) -> list[Entry[Key, Result]]:
    return [entry for entry in entries if entry.state in ("untried", "open") and entry.bound < reach]


def _refine(entry: Entry[Key, Result], failures: tuple[type[Exception], ...]) -> Mapping[Key, float]:
    """One more stage; bounds of others that follow. Bounds never fall: what an earlier stage proved stays proven."""
    try:
        stage = next(entry.stages)
    except failures as error:
        entry.state, entry.error = "failed", error
        return {}
    entry.bound, entry.after = max(entry.bound, stage.bound), stage.after
    if stage.result is not None:
        entry.state, entry.objective, entry.result = "finished", stage.objective, stage.result
    return stage.implied
