"""Which pairs of a block of scores a causal mask and a window leave, as squares that a fused kernel computes.

    rows 4..7 of 8, keys 0..7        rows 4..7: keys 0..3 whole, keys 4..7 causal
    rows 0..9, keys 0..5             rows 0..5: keys 0..5 causal; rows 6..9: keys 0..5 whole
    rows 0..1 and 6..7, keys 0..7    rows 0..1: keys 0..1 causal; rows 6..7: keys 0..5 whole, keys 6..7 causal
    rows 0..7, a window of 4         rows 3..5: keys 0..2 turned, keys 3..5 causal; ...

Rows and keys are runs of global indices, as a rank holds them. A causal square has as many rows as keys, its diagonal
from corner to corner: kernels disagree where else the diagonal would lie. A turned square is causal with rows and keys
in reverse order: its first row sees all of its keys, its last row the last one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

Run: TypeAlias = tuple[int, int]
"""(start, length) of consecutive global indices."""


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Local keys [start, stop) that the rows see: all of them, row i those up to i, or turned, those from i on."""

    start: int
    stop: int
    is_causal: bool = False
    is_turned: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all rows see all keys."""
        return not (self.is_causal or self.is_turned)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Local rows [start, stop) and what they see; nothing where `keys` is empty."""

    start: int
    stop: int
    keys: tuple[KeyBlock, ...]


@dataclass(frozen=True, slots=True)
class Band:
    """Row i sees keys i - before .. i + after, by global index; inf: all on that side."""

    before: float = math.inf
    after: float = math.inf

    @classmethod
    def of(cls, is_causal: bool, window: int | None) -> Band:
        """Of an attention: causal, row i sees keys 0..i; with a window those with |i - j| < window. Raises ValueError
        for a window that leaves one key."""
        if window is None:
            return cls(math.inf, 0 if is_causal else math.inf)
        if window < 2:
            raise ValueError(f"a window of attention is at least 2 keys, its own and one more; got {window}")
        return cls(window - 1, 0 if is_causal else window - 1)

    @property
    def width(self) -> float:
        """Keys beside its own that a row sees."""
        return self.before + self.after

    def sight(self, rows: Sequence[Run], keys: Sequence[Run]) -> str | None:
        """Whether rows see "all" of the keys, "some", or None of them."""
        seen = [self._distances(*pair) for pair in itertools.product(rows, keys)]
        if all(-self.before <= least and most <= self.after for least, most in seen):
            return "all"
        return "some" if any(least <= self.after and -self.before <= most for least, most in seen) else None

    @staticmethod
    def _distances(row: Run, key: Run) -> tuple[int, int]:
        """Least and largest j - i of rows i and keys j."""
        return key[0] - sum(row) + 1, sum(key) - 1 - row[0]


CAUSAL = Band(after=0)


def seen_blocks(rows: Sequence[Run], keys: Sequence[Run], band: Band) -> tuple[RowBlock, ...]:
    """The rows of a rank in blocks, and what these see.

    Rows are cut where a border of the band enters or leaves a run of keys, and in as many as the band is wide, so that
    for each piece and run a border is a diagonal from corner to corner, or does not matter.
    """
    ends = {end for start, length in keys for end in (start, start + length)}
    borders = sorted({int(end + shift) for end in ends for shift in (-band.after, band.before) if math.isfinite(shift)})
    blocks = []
    at = 0
    for first, length in rows:
        cuts = [first, *(border for border in borders if first < border < first + length), first + length]
        for start, stop in _pieces(cuts, band.width):
            blocks.append(RowBlock(at + start - first, at + stop - first, _seen(start, stop, keys, band)))
        at += length
    return tuple(blocks)


def _pieces(cuts: Sequence[int], longest: float) -> Iterator[tuple[int, int]]:
    """(start, stop) between cuts, none longer than that."""
    for start, stop in itertools.pairwise(cuts):
        step = stop - start if math.isinf(longest) else int(longest)
        yield from ((at, min(at + step, stop)) for at in range(start, stop, max(1, step)))


def _seen(start: int, stop: int, keys: Sequence[Run], band: Band) -> tuple[KeyBlock, ...]:
    """Of runs of keys, what rows [start, stop) see; no border of a run lies inside of their squares."""
    found: list[KeyBlock] = []
    at = 0
    for first, length in keys:
        end = first + length
        turned = first <= start - band.before and stop - band.before <= end
        causal = first <= start + band.after and stop + band.after <= end
        is_hidden = start - band.before >= end or stop + band.after <= first
        low = max(first, stop - band.before)  # from here on all rows see
        high = min(end, start + band.after)
        if turned:
            lies = int(at + start - band.before - first)
            found.append(KeyBlock(lies, lies + stop - start, is_turned=True))
        if low < high and not is_hidden:
            whole = KeyBlock(int(at + low - first), int(at + high - first))
            if found and found[-1].stop == whole.start and found[-1].is_whole:
                whole = KeyBlock(found.pop().start, whole.stop)
            found.append(whole)
        if causal:
            lies = int(at + start + band.after - first)
            found.append(KeyBlock(lies, lies + stop - start, is_causal=True))
        at += length
    return tuple(found)


def ring_runs(length: int, ranks: int, zigzag: bool) -> tuple[tuple[Run, ...], ...]:
    """The runs of every rank of a ring over a sequence, in its order or in zigzag order."""
    size = -(-length // (2 * ranks if zigzag else ranks))
    runs = [(start, max(0, min(size, length - start))) for start in range(0, size * ranks * (1 + zigzag), size)]
    return tuple((runs[at], runs[-1 - at]) if zigzag else (runs[at],) for at in range(ranks))


@cache
def ring_offsets(runs: tuple[tuple[Run, ...], ...], band: Band) -> tuple[int, ...]:
    """How far in front of a rank stand those whose keys it meets, in turn, where ranks of a ring hold these runs of
    rows and of keys: 0, 1, 2, ... as far as any rank sees keys, and then -1, -2, ... where that is shorter.

    a causal mask, 4 ranks     0 1 2 3
    a causal window            0 1
    a window on both sides     0 1 -1      so has a causal one in zigzag order
    """
    ranks = len(runs)
    needed = [
        step
        for step in range(1, ranks)
        if any(band.sight(runs[at], runs[(at - step) % ranks]) for at in range(ranks))
    ]

    def back(ahead: int) -> int:
        return ranks - min((step for step in needed if step > ahead), default=ranks)

    ahead = min(range(ranks), key=lambda ahead: (ahead + back(ahead), -ahead))
    return (*range(ahead + 1), *range(-1, -1 - back(ahead), -1))
