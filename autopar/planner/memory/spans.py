"""Spans: runs of neighbouring segments whose values backward makes again together, from what lies at their borders.

    segments   0 1 2 3 4 5 6 7 8        each hands the next one a tensor that backward reads
    spans      [0 1 2] [3 4 5] [6 7 8]  saved: what crosses a border; made again: three segments at a time

A segment by itself cannot drop what the next one's backward reads, so that a chain of n equal layers holds n tensors
however much it computes twice. Spans of sqrt(n) segments hold sqrt(n) borders and what is made again of one span, about
2 sqrt(n) tensors, for the same seconds (Chen et al., Training deep nets with sublinear memory cost, 2016). Where blocks
hold much more inside than they hand on, as those of transformers do, spans of one segment are the smallest.

`smallest_spans` finds the cut into spans, of any lengths, with the smallest fullest moment: for a cap on the moments
the cut that saves least is a recursion over prefixes, and a search over caps does the rest. Gradients that are on
their way are left out, as every cut has them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from torch import fx

from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.problem.factorisation import Value
from autopar.planner.problem.prices import Floats

Starts: TypeAlias = tuple[int, ...]
"""The first segment of every span; the first of all is 0."""
ValueBytes: TypeAlias = Callable[[Value], float]
"""Bytes of an output of an operator of forward, on one rank."""
CAPS = 40
"""Halvings of the search over caps: more than the bits that sums of bytes differ by."""


@dataclass(frozen=True, slots=True, eq=False)
class SpanBytes:
    """Bytes by the segments i .. j - 1 of a span, (S + 1, S + 1). saved: what it hands on, beside what must be saved in
    any case; made: what backward reads and it makes again."""

    saved: Floats
    made: Floats

    @staticmethod
    def of(lifetimes: Lifetimes, value_bytes: ValueBytes, may_repeat: Callable[[fx.Node], bool]) -> SpanBytes:
        """Of a program. may_repeat: whether an operator may run again."""
        size = len(lifetimes.segments.names)
        every, kept = np.zeros((2, size + 1, size + 1))
        passed = np.zeros(size + 1)
        for node, home in lifetimes.segment.items():
            if node.meta["phase"] == "backward":
                continue
            repeats = may_repeat(node)
            for output in lifetimes.saved_outputs(node):
                low, high = extent(lifetimes, (node, output), home)
                is_kept = output in lifetimes.kept_outputs(node)
                held = value_bytes((node, output)) if repeats or is_kept else 0.0
                passed[home] += held
                if repeats:
                    every[low, high] += held
                    kept[low, high] += held if is_kept else 0.0
        inside = _within(every)
        total = np.concatenate([[0.0], np.cumsum(passed[:-1])])
        return SpanBytes(saved=total[None, :] - total[:, None] - inside, made=_within(kept))

    def peak(self, starts: Starts) -> float:
        """Bytes at the fullest moment of backward under a cut."""
        held = fullest = 0.0
        for first, end in pairwise((*starts, len(self.saved) - 1)):
            held += float(self.saved[first, end])
            fullest = max(fullest, held + float(self.made[first, end]))
        return fullest

    def saved_by(self, starts: Starts) -> float:
        """Bytes that forward hands on under a cut, beside what must be saved in any case."""
        return float(sum(self.saved[run] for run in pairwise((*starts, len(self.saved) - 1))))

    def part(self, first: int, end: int) -> SpanBytes:
        """Of the segments first .. end - 1 alone."""
        inside = slice(first, end + 1)
        return SpanBytes(saved=self.saved[inside, inside], made=self.made[inside, inside])

    def least_saved(self, cap: float) -> Starts | None:
        """The cut that saves the least of those under a cap; None where there is none."""
        size = len(self.saved) - 1
        least, before = np.full(size + 1, np.inf), np.zeros(size + 1, dtype=np.int64)
        least[0] = 0.0
        for end in range(1, size + 1):
            saved = least[:end] + self.saved[:end, end]
            saved[saved + self.made[:end, end] > cap] = np.inf
            before[end] = int(np.argmin(saved))
            least[end] = saved[before[end]]
        if np.isinf(least[size]):
            return None
        starts, at = list[int](), size
        while at:
            at = int(before[at])
            starts.append(at)
        return tuple(reversed(starts))


def smallest_spans(spans: SpanBytes) -> Starts:
    """The cut whose fullest moment is smallest."""
    best = tuple(range(len(spans.saved) - 1))
    low, high = 0.0, spans.peak(best)
    for _ in range(CAPS):
        cap = (low + high) / 2
        found = spans.least_saved(cap)
        if found is None:
            low = cap
        else:
            best, high = found, spans.peak(found)
    return best


def spans_in(lifetimes: Lifetimes, recomputed: Collection[str]) -> Starts:
    """The shortest spans in which these operators can be made again; recomputed: their names."""
    is_inside = np.zeros(len(lifetimes.segments.names) + 1, dtype=bool)
    again = {node for node in lifetimes.segment if str(node.meta["operator"]) in recomputed}
    for node in again:
        homes = {lifetimes.segment[node]}
        for output in lifetimes.saved_outputs(node):
            homes |= lifetimes.backward_of((node, output))
            readers = lifetimes.forward_readers.get((node, output), ())
            homes |= {lifetimes.segment[reader] for reader in readers if reader in again}
        is_inside[min(homes) + 1 : max(homes) + 1] = True
    return tuple(np.flatnonzero(~is_inside[:-1]).tolist())


def extent(lifetimes: Lifetimes, value: Value, home: int) -> tuple[int, int]:
    """(the first segment, the last one) of what makes and reads a value."""
    readers = [lifetimes.segment[reader] for reader in lifetimes.forward_readers.get(value, ())]
    found = {home, *readers, *lifetimes.backward_of(value)}
    return min(found), max(found)


def _within(by_extent: Floats) -> Floats:
    """[i, j]: the sum of what lies within the segments i .. j - 1, of bytes by (first, last) segment."""
    up_to = np.cumsum(by_extent[::-1], axis=0)[::-1].cumsum(axis=1)
    found = np.zeros_like(by_extent)
    found[:, 1:] = up_to[:, :-1]
    return np.triu(found)
