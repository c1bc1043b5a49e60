"""Mesh search: best first over candidates that become known in stages, so that hopeless ones are dropped unsolved.

    candidate    bound after stage 1    objective
    (8,)         78.6                   dropped: nothing on it is under 78.6
    (2, 4)       75.0                   77.1
    (2, 2, 2)    76.0                   76.5        the best

A candidate is an iterator of `Stage`s: each costs more and knows more, the last one has the result. `best_first` always
refines the candidate with the lowest bound, of equal ones the most promising, then the first. Let u be the smallest
objective of the finished ones and b(c) the bound of a candidate: once u <= b(c) for all others, u is the optimum over
all of them. min(u, min b) is a valid bound whenever the search ends, also at its time limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

ROUNDING = 1e-9
"""Relative difference below which a bound counts as reached."""

Key = TypeVar("Key")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Generic[Result]):
    """What is known of a candidate after a stage. bound: no result of it has a smaller objective."""

    bound: float
    objective: float = math.inf
    result: Result | None = None


State = Literal["untried", "open", "finished", "failed", "refused"]


@dataclass(slots=True, eq=False)
class Entry(Generic[Key, Result]):
    """A candidate and how far it came. `open` when the search ends: dropped by its bound, or by the time limit."""

    key: Key
    stages: Iterator[Stage[Result]]
    state: State = "untried"
    bound: float = 0.0
    objective: float = math.inf
    result: Result | None = None
    error: Exception | None = None
    """Why it failed: of one of the types that `best_first` was told to expect."""
    refusal: str = ""
    """Why it was not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[Key, Result]):
    """All candidates in their order, the best of the finished ones (None: none finished), and whether time ended it."""

    entries: tuple[Entry[Key, Result], ...]
    best: Entry[Key, Result] | None
    timed_out: bool

    @property
    def bound(self) -> float:
        """No result of any candidate has a smaller objective; candidates that failed keep the bound they had."""
        return min((min(entry.bound, entry.objective) for entry in self.entries), default=math.inf)


def best_first(
    candidates: Mapping[Key, Iterator[Stage[Result]]],
    *,
    seconds: float,
    failures: tuple[type[Exception], ...] = (),
    refuse: Callable[[Key], str] = lambda key: "",
    promise: Callable[[Key], float] = lambda key: 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome[Key, Result]:
    """Refine candidates, lowest bound first, until the best finished one is proven or `seconds` have passed.

    When time is up and nothing is finished, the search goes on among the candidates that it has opened until one is:
    a late result is better than none. failures: exceptions by which a stage says that its candidate has no result.
    refuse: asked before the first stage of a candidate; a reason leaves it out. promise: a guess of the objective,
    which proves nothing: among candidates with one bound, the smallest comes first.
    """
    entries = [Entry(key, stages) for key, stages in candidates.items()]
    end = clock() + seconds
    best: Entry[Key, Result] | None = None
    timed_out = False
    while True:
        timed_out = timed_out or clock() > end
        entry = _next(entries, best, timed_out, promise)
        if entry is None:
            return Outcome(entries=tuple(entries), best=best, timed_out=timed_out and _is_unproven(entries, best))
        if entry.state == "untried":
            entry.refusal = refuse(entry.key)
            entry.state = "refused" if entry.refusal else "open"
        if entry.state == "open":
            _refine(entry, failures)
        if entry.state == "finished" and (best is None or entry.objective < best.objective):
            best = entry


def _next(
    entries: list[Entry[Key, Result]],
    best: Entry[Key, Result] | None,
    timed_out: bool,
    promise: Callable[[Key], float],
) -> Entry[Key, Result] | None:
    """The candidate to refine: the lowest bound among those that can still beat the best one; None to stop."""
    hopeful = [entry for entry in entries if entry.state in ("untried", "open") and _may_beat(entry, best)]
    if timed_out:
        if best is not None:
            return None
        opened = [entry for entry in hopeful if entry.state == "open"]
        tried = any(entry.state not in ("untried", "refused") for entry in entries)
        hopeful = opened if tried else hopeful
    return min(hopeful, key=lambda entry: (entry.bound, promise(entry.key)), default=None)


def _may_beat(entry: Entry[Key, Result], best: Entry[Key, Result] | None) -> bool:
    return best is None or entry.bound < best.objective * (1 - ROUNDING)


def _is_unproven(entries: list[Entry[Key, Result]], best: Entry[Key, Result] | None) -> bool:
    return any(entry.state in ("untried", "open") and _may_beat(entry, best) for entry in entries)


def _refine(entry: Entry[Key, Result], failures: tuple[type[Exception], ...]) -> None:
    """One more stage. Bounds never fall: what an earlier stage proved stays proven."""
    try:
        stage = next(entry.stages)
    except failures as error:
        entry.state, entry.error = "failed", error
        return
    entry.bound = max(entry.bound, stage.bound)
    if stage.result is not None:
        entry.state, entry.objective, entry.result = "finished", stage.objective, stage.result
