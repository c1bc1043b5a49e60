"""Index blocks: what a rank holds of a tensor, as runs of indices along every dim, and the algebra of such blocks.

    block_of((8, 6), (Shard(0),), Mesh(("tp",), (2,)), 1)     (((4, 4),), ((0, 6),))     rows 4 to 7, all columns
    common(rows_4_to_7, columns_0_to_2)                       (((4, 4),), ((0, 3),))
    without(rows_4_to_7, columns_0_to_2)                      [(((4, 4),), ((3, 3),))]

A block is a product: an element lies in it where its index along every dim lies in one of the runs of that dim. So is
what two blocks have in common, and what one has beyond another is a few disjoint products, at most one a dim. Strided
and zigzag layouts and placed experts are no exceptions: their dims have several runs.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.layouts.placement import Layout, Mesh, local_runs

Runs: TypeAlias = Sequence[tuple[int, int]]
"""(start, length) of indices along a dim, in the order in which a block holds them: ascending, but for placed
experts."""
Block: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
"""The runs along every dim."""


def block_of(shape: Sequence[int], layout: Layout, mesh: Mesh, place: int) -> Block:
    """What the rank at `place` of the mesh holds of a tensor of this shape, in the order in which it lies there."""
    coordinate = mesh.coordinate(place)
    return tuple(local_runs(size, layout, dim, mesh, coordinate) for dim, size in enumerate(shape))


def whole_block(shape: Sequence[int]) -> Block:
    """All of a tensor."""
    return tuple(((0, size),) if size else () for size in shape)


def block_shape(block: Block) -> tuple[int, ...]:
    """Of the tensor that holds a block."""
    return tuple(sum(length for _, length in runs) for runs in block)


def elements(block: Block) -> int:
    """How many elements lie in a block."""
    return math.prod(block_shape(block))


def ascending(block: Block) -> Block:
    """The same elements, with runs that ascend and do not touch: equal for two blocks of the same elements."""
    return tuple(_joined(sorted(run for run in runs if run[1])) for runs in block)


def _joined(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for start, length in runs:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return tuple(found)


def common(one: Block, other: Block) -> Block | None:
    """What lies in both blocks, whose runs ascend; None where that is nothing."""
    found = []
    for mine, theirs in zip(one, other, strict=True):
        runs = _common_runs(mine, theirs)
        if not runs:
            return None
        found.append(runs)
    return tuple(found)


def _common_runs(one: Runs, other: Runs) -> tuple[tuple[int, int], ...]:
    if one == other:
        return tuple(one)
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start = max(one[i][0], other[j][0])
        ends = sum(one[i]), sum(other[j])
        if start < min(ends):
            found.append((start, min(ends) - start))
        i, j = i + (ends[0] <= ends[1]), j + (ends[1] <= ends[0])
    return tuple(found)


def without(block: Block, other: Block) -> list[Block]:
    """What lies in `block` and not in `other`, as disjoint blocks; the runs of both ascend."""
    inside = common(block, other)
    if inside is None:
        return [block] if elements(block) else []
    found = []
    for dim, (runs, within) in enumerate(zip(block, inside, strict=True)):
        beyond = _runs_without(runs, within)
        if beyond:
            found.append((*inside[:dim], beyond, *block[dim + 1 :]))
    return found


def _runs_without(runs: Runs, taken: Runs) -> tuple[tuple[int, int], ...]:
    """taken: each of it inside of one of the runs."""
    found = []
    for start, length in runs:
        end = start + length
        for begin, size in taken:
            if start <= begin < end:
                if begin > start:
                    found.append((start, begin - start))
                start = begin + size
        if start < end:
            found.append((start, end - start))
    return tuple(found)


def cut_block(block: Block, most: int) -> Iterator[Block]:
    """The block in parts of at most `most` elements, cut along the outermost dims, so that each lies together."""
    if elements(block):
        yield from _cut(block, 0, max(most, 1))


def _cut(block: Block, dim: int, most: int) -> Iterator[Block]:
    if elements(block) <= most:
        yield block
        return
    inside = math.prod(block_shape(block)[dim + 1 :]) * math.prod(block_shape(block)[:dim])
    for part in _groups(block[dim], max(most // inside, 1)):
        yield from _cut((*block[:dim], part, *block[dim + 1 :]), dim + 1, most)


def _groups(runs: Runs, size: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The indices of runs in groups of `size`."""
    group: list[tuple[int, int]] = []
    room = size
    for start, length in runs:
        while length:
            taken = min(length, room)
            group.append((start, taken))
            start, length, room = start + taken, length - taken, room - taken
            if not room:
                yield tuple(group)
                group, room = [], size
    if group:
        yield tuple(group)


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring indices of a dim that lie together in two blocks: where they begin in each."""

    here: int
    there: int
    length: int


def boxes(here: Block, there: Block, part: Block) -> Iterator[tuple[Segment, ...]]:
    """How a part of two blocks is copied from the one to the other: boxes, a segment for every dim.

    here, there: in the order in which the blocks hold their elements; part: ascending runs, all of them in both."""
    yield from itertools.product(*map(_shared_segments, here, there, part))


def _shared_segments(here: Runs, there: Runs, part: Runs) -> list[Segment]:
    found = list[Segment]()
    held = _places(here), _places(there)
    for start, length in part:
        end = start + length
        while start < end:
            (mine, my_end), (theirs, their_end) = (_place(places, start) for places in held)
            stop = min(end, my_end, their_end)
            last = found[-1] if found else None
            if last and (last.here + last.length, last.there + last.length) == (mine, theirs):
                found[-1] = Segment(last.here, last.there, last.length + stop - start)
            else:
                found.append(Segment(mine, theirs, stop - start))
            start = stop
    return found


def _places(runs: Runs) -> list[tuple[int, int, int]]:
    """(start, length, where it begins in the block) of every run, ascending."""
    begins = itertools.accumulate((length for _, length in runs), initial=0)
    return sorted((start, length, begin) for (start, length), begin in zip(runs, begins, strict=False) if length)


def _place(places: Sequence[tuple[int, int, int]], index: int) -> tuple[int, int]:
    """Where an index lies in a block, and up to which index those behind it lie there together."""
    start, length, begin = places[bisect.bisect_right(places, index, key=lambda each: each[0]) - 1]
    return begin + index - start, start + length
