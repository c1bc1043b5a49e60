"""Nested spans: segments made again more than once, where one level of spans holds too much.

    backward of 0 .. 7, with what crosses into 0 at hand
        make 0 .. 4 again, keep what crosses into 5            5 6 7: made again, their backward
        give up 0 .. 4                                         0 .. 4: the same once more, by itself

A run is made again as a whole for its backward, or it is cut in two: the first part is passed through for what the
second one reads of it, and made anew when its own turn comes. With m tensors of room a chain of n layers of one size
then costs about n log n / log m forward passes of a layer instead of n. The best tree of cuts, for given bytes, is a
recursion over runs and room (Beaumont et al., Optimal checkpointing for heterogeneous chains, 2019, without offload;
for equal layers Griewank and Walther's Revolve, 2000). Exact but for two things: room is counted in `SLOTS` parts,
rounded up, and a model of more than `MOST_SEGMENTS` segments is cut between groups of neighbours only.

The same trees say what forward itself saves: the cuts of the whole, which cost nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from torch import fx

from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.spans import SpanBytes, Starts, extent, spans_in
from autopar.planner.memory.time_segments import span_of
from autopar.planner.problem.prices import Floats

SLOTS = 96
MOST_SEGMENTS = 96
Run: TypeAlias = tuple[int, int]
"""The first segment, and the one behind the last."""


@dataclass(frozen=True, slots=True)
class NestedSpans:
    """starts: of the spans at whose borders forward saves; anew: runs that are given up, and made once more when
    backward comes to them; seconds: of everything that runs again."""

    starts: Starts
    anew: tuple[Run, ...]
    seconds: float

    def given_up(self, lifetimes: Lifetimes) -> dict[fx.Node, tuple[int, ...]]:
        """As `Lifetimes.joined` takes it. What the run behind reads as well is at hand there, and stays."""
        begins = _first_positions(lifetimes)
        found = {}
        for node, home in lifetimes.segment.items():
            if node.meta["phase"] == "backward":
                continue
            ends = [extent(lifetimes, (node, output), home)[1] for output in lifetimes.saved_outputs(node)]
            last = max(ends, default=home)
            positions = {begins[end - 1] for first, end in self.anew if first <= home <= last < end}
            if positions:
                found[node] = tuple(sorted(positions))
        return found


def fastest_nested(spans: SpanBytes, seconds: Sequence[float], room: float) -> NestedSpans | None:
    """The tree of cuts that takes the least seconds of those that hold at most `room` bytes; None where there is none.
    seconds: of forward of every segment."""
    return Trees.of(spans, seconds, room).best() if room > 0.0 else None


def _slots(bytes_: Floats, room: float) -> Floats:
    return np.ceil(bytes_ / room * SLOTS - 1e-9)


def given_up_by(lifetimes: Lifetimes, recompute_at: Mapping[str, Collection[str]]) -> dict[fx.Node, tuple[int, ...]]:
    """As `Lifetimes.joined` takes it, of a plan: operator -> names of operators of backward. What a plan saves could be
    given up where its segment is."""
    position = {str(node.meta["operator"]): place for node, place in lifetimes.position.items()}
    found, by_segment = {}, dict[int, set[int]]()
    for node, home in lifetimes.segment.items():
        if moments := recompute_at.get(str(node.meta["operator"])):
            found[node] = tuple(sorted(position[name] for name in moments))
            by_segment.setdefault(home, set()).update(found[node])
    for node, home in lifetimes.segment.items():
        if home in by_segment and str(node.meta["operator"]) not in recompute_at and node.meta["phase"] != "backward":
            found[node] = tuple(sorted(by_segment[home]))
    return found


def joined_by(lifetimes: Lifetimes, recompute_at: Mapping[str, Collection[str]]) -> Lifetimes:
    """The lifetimes with the spans of a plan. recompute_at: of every operator that it computes again."""
    starts = spans_in(lifetimes, recompute_at)
    last = span_of(starts, lifetimes.segments.last)
    again = {node for node in lifetimes.segment if str(node.meta["operator"]) in recompute_at}
    in_last = any(span_of(starts, lifetimes.segment[node]) == last for node in again)
    if not in_last and len(starts) == len(lifetimes.segments.names):
        return lifetimes
    return lifetimes.joined(starts, given_up_by(lifetimes, recompute_at), repeats_last=in_last)


class Trees:
    """The recursion, over groups of neighbouring segments. at: the first segment of every group; spans, seconds: of
    groups, a forward pass up to each; border: slots that a run hands on; whole: slots of a run made as a whole."""

    def __init__(self, at: Sequence[int], spans: SpanBytes, passes: Floats, room: float) -> None:
        self.at, self.spans, self.size = at, spans, len(passes) - 1
        self.border = _slots(spans.saved, room).astype(np.int64)
        self.whole = _slots(spans.saved + spans.made, room)
        self.seconds = passes[None, :] - passes[:, None]
        self._best: dict[Run, Floats] = {}
        """Run -> (SLOTS + 1,) least seconds with so many slots."""
        for length in range(1, self.size + 1):
            for first in range(self.size - length + 1):
                self._best[first, first + length] = self._of_run(first, first + length)

    @staticmethod
    def of(spans: SpanBytes, seconds: Sequence[float], room: float) -> Trees:
        """Of some segments; seconds: of forward of every one."""
        size = len(seconds)
        at = np.unique(np.linspace(0, size, min(size, MOST_SEGMENTS) + 1).round().astype(int))
        grouped = SpanBytes(saved=spans.saved[np.ix_(at, at)], made=spans.made[np.ix_(at, at)])
        return Trees(at.tolist(), grouped, np.concatenate([[0.0], np.cumsum(seconds)])[at], room)

    def of_segments(self, found: NestedSpans) -> NestedSpans:
        """Spans of groups as those of segments."""
        at = self.at
        return replace(
            found, starts=tuple(at[s] for s in found.starts), anew=tuple((at[i], at[j]) for i, j in found.anew)
        )

    def seconds_of(self, run: Run, slots: int) -> float:
        """The least seconds of making a run again with so many slots; infinity where they do not do."""
        return float(self._best[run][slots])

    def best(self) -> NestedSpans | None:
        """The fastest tree of a whole that backward begins behind."""
        whole = self._of_ends()
        if np.isinf(whole[0][SLOTS]):
            return None
        starts, anew, first, room = [0], list[Run](), 0, SLOTS
        while (cut := self._first_cut(whole, first, room)) is not None:
            anew += self.anew((first, cut), room)
            room -= int(self.border[first, cut])
            starts.append(cut)
            first = cut
        return self.of_segments(NestedSpans(tuple(starts), tuple(anew), float(whole[0][SLOTS])))

    def _of_run(self, first: int, end: int) -> Floats:
        options = [np.where(np.arange(SLOTS + 1) >= self.whole[first, end], self.seconds[first, end], np.inf)]
        options += [self._cut_at(first, cut, end) for cut in range(first + 1, end)]
        return np.asarray(np.min(options, axis=0))

    def _cut_at(self, first: int, cut: int, end: int) -> Floats:
        behind = _with_less(self._best[cut, end], self.border[first, cut])
        return np.asarray(self.seconds[first, cut] + behind + self._best[first, cut])

    def _of_ends(self) -> dict[int, Floats]:
        """First segment of what is left -> least seconds, where forward saves what the cuts need."""
        found: dict[int, Floats] = {}
        for first in reversed(range(self.size)):
            found[first] = np.min([self._saved(found, first, None), *self._cuts(found, first)], axis=0)
        return found

    def _cuts(self, found: dict[int, Floats], first: int) -> Iterator[Floats]:
        return (self._saved(found, first, cut) for cut in range(first + 1, self.size))

    def _saved(self, found: dict[int, Floats], first: int, cut: int | None) -> Floats:
        if cut is None:  # backward begins here, and nothing is made again
            return np.where(np.arange(SLOTS + 1) >= self.whole[first, self.size], 0.0, np.inf)
        return _with_less(found[cut], self.border[first, cut]) + self._best[first, cut]

    def _first_cut(self, found: dict[int, Floats], first: int, room: int) -> int | None:
        if self._saved(found, first, None)[room] <= found[first][room]:
            return None
        return first + 1 + int(np.argmin([option[room] for option in self._cuts(found, first)]))

    def anew(self, run: Run, room: int) -> Iterator[Run]:
        """The first parts of all cuts inside of a run that is made again with so many slots."""
        stack = [(run, room)]
        while stack:
            (first, end), held = stack.pop()
            if held >= self.whole[first, end]:
                continue
            options = [self._cut_at(first, cut, end)[held] for cut in range(first + 1, end)]
            cut = first + 1 + int(np.argmin(options))
            yield first, cut
            stack += [((first, cut), held), ((cut, end), held - int(self.border[first, cut]))]


def _with_less(best: Floats, slots: int) -> Floats:
    """The least seconds by the slots at hand, of which so many are taken."""
    taken = min(int(slots), SLOTS + 1)
    return np.concatenate([np.full(taken, np.inf), best[: SLOTS + 1 - taken]])


def _first_positions(lifetimes: Lifetimes) -> list[int]:
    """The position at which backward comes to every segment."""
    begins = [lifetimes.end] * len(lifetimes.segments.names)
    for position, node in enumerate(lifetimes.in_order):
        if node.meta["phase"] == "backward":
            home = lifetimes.segment[node]
            begins[home] = min(begins[home], position)
    for home in range(len(begins) - 2, -1, -1):
        if begins[home] == lifetimes.end:  # nothing of backward: where it comes to the next one behind
            begins[home] = begins[home + 1]
    return begins
