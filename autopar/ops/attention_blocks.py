"""Which pairs of a causal block of scores are there, as whole and causal squares that a fused kernel computes.

    rows 4..7 of 8, keys 0..7        rows 4..7: keys 0..3 whole, keys 4..7 causal
    rows 0..9, keys 0..5             rows 0..5: keys 0..5 causal; rows 6..9: keys 0..5 whole
    rows 0..1 and 6..7, keys 0..7    rows 0..1: keys 0..1 causal; rows 6..7: keys 0..5 whole, keys 6..7 causal

Rows and keys are runs of global indices, as a rank holds them. A causal square has as many rows as keys, its diagonal
from corner to corner: kernels disagree where else the diagonal would lie.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Run: TypeAlias = tuple[int, int]
"""(start, length) of consecutive global indices."""


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Local keys [start, stop) that the rows see: all of them, or key j from row j on."""

    start: int
    stop: int
    is_causal: bool = False


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Local rows [start, stop) and what they see; nothing where `keys` is empty."""

    start: int
    stop: int
    keys: tuple[KeyBlock, ...]


def causal_blocks(rows: Sequence[Run], keys: Sequence[Run]) -> tuple[RowBlock, ...]:
    """The rows of a rank in blocks, under "row i sees keys 0..i", both by global index.

    Rows are cut where a run of keys begins or ends, so that each piece lies before, behind or on such a run's diagonal.
    """
    borders = sorted({border for start, length in keys for border in (start, start + length)})
    blocks = []
    at = 0
    for first, length in rows:
        cuts = [first, *(border for border in borders if first < border < first + length), first + length]
        for start, stop in itertools.pairwise(cuts):
            blocks.append(RowBlock(at + start - first, at + stop - first, _seen(start, stop, keys)))
        at += length
    return tuple(blocks)


def _seen(start: int, stop: int, keys: Sequence[Run]) -> tuple[KeyBlock, ...]:
    """Of runs of keys, what rows [start, stop) see; no border of a run lies between these rows."""
    found: list[KeyBlock] = []
    at = 0
    for first, length in keys:
        whole = min(first + length, start) - first
        if whole > 0:
            before = found[-1] if found else None
            if before is not None and before.stop == at and not before.is_causal:
                found[-1] = KeyBlock(before.start, at + whole)
            else:
                found.append(KeyBlock(at, at + whole))
        if first <= start and stop <= first + length:
            found.append(KeyBlock(at + start - first, at + stop - first, is_causal=True))
        at += length
    return tuple(found)
