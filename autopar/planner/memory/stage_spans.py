"""Spans in a stage of a pipeline: what forward saves is held once per micro-batch in flight, what is made again once.

    16 equal layers     in flight     forward saves              backward makes again
    1                                 3 borders                  4 layers at a time
    8                                 8 x 1                      8
    8, nested                         nothing of its own         all 16, passed through: 4 borders, then 4 at a time

So the more micro-batches wait, the longer are the best spans, and the sooner they nest (`nested_spans.py`): borders
that backward makes by itself are there for one micro-batch only. The cuts that are looked at save the least under some
caps on what a span makes again, all cuts of a few segments; for each the trees of runs within the room that the
micro-batches leave are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np

from autopar.planner.memory.nested_spans import SLOTS, NestedSpans, Trees
from autopar.planner.memory.spans import SpanBytes, Starts, smallest_spans

CUTS = 24
"""Caps that are looked at: distinct ones for up to as many equal segments of a stage."""
ALL_CUTS = 7
"""Of up to so many segments every cut is looked at."""


def fastest_in_stage(
    spans: SpanBytes, seconds: list[float], room: float, in_flight: int, *, keeps_last: bool
) -> NestedSpans | None:
    """The fastest spans of a stage that hold at most `room` bytes; None where none do.

    in_flight: micro-batches whose forward has run when backward runs, its own among them. seconds: of forward of every
    segment. keeps_last: nothing of the last span is made again, as it is the last one of the model.
    """
    if room <= 0.0:
        return None
    trees = Trees.of(_last_kept(spans) if keeps_last else spans, seconds, room)
    found = [_within(trees, starts, room, in_flight, keeps_last) for starts in set(_cuts(trees.spans))]
    best = min((each for each in found if each is not None), key=lambda each: (each.seconds, each.starts), default=None)
    return None if best is None else trees.of_segments(best)


def smallest_in_stage(spans: SpanBytes, in_flight: int, *, keeps_last: bool) -> Starts:
    """The cut of one level whose fullest moment is smallest."""
    spans = _last_kept(spans) if keeps_last else spans
    return min(_cuts(spans), key=lambda starts: ((in_flight - 1) * spans.saved_by(starts) + spans.peak(starts), starts))


def _last_kept(spans: SpanBytes) -> SpanBytes:
    """The same where the last span of all saves what the others make again."""
    saved, made = spans.saved.copy(), spans.made.copy()
    saved[:, -1] += made[:, -1]
    made[:, -1] = 0.0
    return SpanBytes(saved=saved, made=made)


def _cuts(spans: SpanBytes) -> Iterator[Starts]:
    """Cuts that save the least under some caps, from the smallest one to a single span; all of a few segments."""
    size = len(spans.saved) - 1
    if size <= ALL_CUTS:
        yield from ((0, *rest) for number in range(size) for rest in combinations(range(1, size), number))
        return
    smallest, whole = smallest_spans(spans), (0,)
    yield from (smallest, whole, tuple(range(size)))
    for cap in np.linspace(spans.peak(smallest), spans.peak(whole), CUTS)[1:-1].tolist():
        found = spans.least_saved(cap)
        if found is not None:
            yield found


def _within(trees: Trees, starts: Starts, room: float, in_flight: int, keeps_last: bool) -> NestedSpans | None:
    """A cut with its spans made again in what the micro-batches in flight leave of the room."""
    spans, size = trees.spans, trees.size
    held, cost, anew = (in_flight - 1) * spans.saved_by(starts), 0.0, list[tuple[int, int]]()
    for run in pairwise((*starts, size)):
        if keeps_last and run[1] == size:
            return NestedSpans(starts, tuple(anew), cost) if held + spans.saved[run] <= room else None
        slots = math.floor((room - held) / room * SLOTS + 1e-9)
        if slots < 0 or math.isinf(took := trees.seconds_of(run, slots)):
            return None
        cost, anew = cost + took, [*anew, *trees.anew(run, slots)]
        held += float(spans.saved[run])
    return NestedSpans(starts, tuple(anew), cost)
