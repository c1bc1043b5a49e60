"""Rows per rank: how many rows of a layer of experts the busiest rank has, and what is sent to whom, in expectation.

    busiest_part((0.25, 0.25, 0.25, 0.25), ranks=2, rows=4096)                0.504: half of them, and its luck
    fullest_part((0.25, 0.25, 0.25, 0.25), ranks=2, rows=4096)                0.520: it has more in one step of 100
    sent_parts((0.25, 0.25, 0.25, 0.25), (), ranks=2, chosen=2)               (0.42, 0.42): tokens, each once to a rank
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

EXCEEDED, HALVINGS = 0.01, 40
"""How likely some rank may have more rows in a step than memory is planned for, and how often that is bracketed."""
WORTH_ONCE = 0.95
"""Part of the rows below which tokens travel instead: who gets which is exchanged, too."""
_LEAST_LIKELY, _ROUNDS = 1e-3, 5
"""Part of the tokens that an expert has at least and leaves at least, and how often odds are mended: of 16 experts
loaded by Zipf's law, what travels is then within 0.1 % of draws, 2 % without."""
REACH, POINTS = 6.0, 64
"""How far from the mean of the busiest rank a count is looked for, in standard deviations, and at how many points."""


@cache
def busiest_part(shares: tuple[float, ...], ranks: int, rows: int) -> float:
    """The part of `rows` rows that the rank with most of them expects; experts lie in blocks, as torch.chunk cuts them.

    shares: of each expert, summing to 1. Rows choose independently of each other here; those of one text do not, so
    that real loads are less even. Counts of ranks are taken for independent normal numbers. The mean of their largest
    is the largest mean, plus the integral, over all values above it, of how likely one of them is larger, less that,
    over all values below, of how likely none is.
    """
    parts = _parts(shares, ranks)
    most, spread = _largest(parts, rows)
    if spread == 0.0 or ranks == 1:
        return most
    step, found = REACH * spread / POINTS, most
    for point in range(-POINTS, POINTS):
        at = most + (point + 0.5) * step
        below = _none_above(at, parts, rows)
        found += step * ((1.0 - below) if at > most else -below)
    return min(1.0, found)


@cache
def fullest_part(shares: tuple[float, ...], ranks: int, rows: int) -> float:
    """The part of `rows` rows than which no rank has more, but with the chance `EXCEEDED`; as `busiest_part`."""
    parts = _parts(shares, ranks)
    most, spread = _largest(parts, rows)
    below, above = most, min(1.0, most + REACH * spread)
    for _ in range(HALVINGS):
        middle = 0.5 * (below + above)
        if _none_above(middle, parts, rows) < 1.0 - EXCEEDED:
            below = middle
        else:
            above = middle
    return above


def _parts(shares: Sequence[float], ranks: int) -> Counter[float]:
    """The part of the rows that a rank expects -> how many ranks do."""
    block = -(-len(shares) // ranks)
    return Counter(math.fsum(shares[start : start + block]) for start in range(0, len(shares), block))


def _largest(parts: Counter[float], rows: int) -> tuple[float, float]:
    """Mean and standard deviation of the part that the rank with the largest expects."""
    most = max(parts)
    return most, math.sqrt(most * (1.0 - most) / max(rows, 1))


def _none_above(value: float, parts: Counter[float], rows: int) -> float:
    """How likely no rank has more than this part of the rows."""
    return math.prod(_below(value, part, rows) ** count for part, count in parts.items())


class ExchangedRows(NamedTuple):
    """What goes over the links. rows: of each rank, at home; parts: of these to every rank of the group, what stays at
    home whatever the load is in none; back: they return. travels: of the rows that the busiest rank computes, the part
    that came to experts of its own."""

    rows: int
    parts: tuple[float, ...]
    back: bool
    travels: float

    def sent(self, position: int) -> list[float]:
        """Rows that the rank at a position of the group sends to every rank of it."""
        return [self.rows * (self.parts[position] if self.back else part) for part in self.parts]


class BusiestRows(NamedTuple):
    """Parts of the rows of a layer. computed: by the rank with most of them; received: for experts of its own, among
    these; fullest: than which none computes more, but with the chance `EXCEEDED`."""

    computed: float
    received: float
    fullest: float


@cache
def sent_parts(
    shares: tuple[float, ...], replicated: tuple[int, ...], ranks: int, chosen: int = 1
) -> tuple[float, ...]:
    """How many rows a rank sends to each, as a part of its own; experts lie in blocks, as torch.chunk cuts them, and
    rows of replicated ones travel nowhere.

    chosen: so many rows are those of one token, for different experts, and what is sent are tokens, each once to a
    rank. A set of experts is chosen in proportion to the product of their odds (conditional Poisson sampling), which
    are such that every expert has its share; a token has none of a rank's with the part of the sets without these.
    """
    block, travel = -(-len(shares) // ranks), travelling(shares, replicated)
    starts = range(0, block * ranks, block)
    if chosen == 1:
        return tuple(math.fsum(travel[start : start + block]) for start in starts)
    if chosen * max(shares) > 1.0 + _LEAST_LIKELY:  # no set of different experts has one so often
        sums = (math.fsum(travel[start : start + block]) for start in starts)
        return tuple((1.0 - (1.0 - min(part, 1.0)) ** chosen) / chosen for part in sums)
    odds = _odds(shares, chosen)
    every, found = _weights_of_sets(odds, chosen)[chosen], []
    for start in starts:
        own = [expert for expert in range(start, min(start + block, len(shares))) if expert not in replicated]
        found.append((1.0 - _weights_of_sets(np.delete(odds, own), chosen)[chosen] / every) / chosen)
    return tuple(map(float, found))


def hop_parts(
    shares: tuple[float, ...], replicated: tuple[int, ...], ranks: tuple[int, ...], at: int, chosen: int = 1
) -> tuple[float, ...]:
    """How many rows a rank sends to each rank of the last of its hops, as a part of its own at home. ranks: of every
    hop so far; at: of the parts into which the hops before cut the group, the one of this rank, to which as many ranks
    as these parts are have sent what goes on. Other arguments: of `sent_parts`, where one hop is all."""
    before, last = math.prod(ranks[:-1]), ranks[-1]
    parts = sent_parts(shares, replicated, before * last, chosen)
    return tuple(before * part for part in parts[at * last : (at + 1) * last])


def _odds(shares: Sequence[float], chosen: int) -> NDArray[np.float64]:
    """(E,) of every expert, by which sets of so many have it as often as its share says."""
    wanted = np.clip(chosen * np.array(shares), _LEAST_LIKELY, 1.0 - _LEAST_LIKELY)
    odds: NDArray[np.float64] = wanted / (1.0 - wanted)
    wanted = odds
    for _ in range(_ROUNDS):
        weights, without = _weights_of_sets(odds, chosen), np.ones_like(odds)
        for size in range(1, chosen):
            without = weights[size] - odds * without  # of sets of this size that lack the expert
        part = np.clip(odds * without / weights[chosen], _LEAST_LIKELY, 1.0 - _LEAST_LIKELY)
        odds = odds * wanted * (1.0 - part) / part
    return odds


def _weights_of_sets(odds: NDArray[np.float64], chosen: int) -> NDArray[np.float64]:
    """(chosen + 1,) by size: the sum over all sets of experts of the products of their odds."""
    sums = np.zeros(chosen + 1)
    sums[0] = 1.0
    for one in odds:
        sums[1:] += one * sums[:-1]
    return sums


def once_per_rank(shares: tuple[float, ...], replicated: tuple[int, ...], ranks: int, chosen: int) -> float | None:
    """How many tokens travel, as a part of the rows that would: each once to a rank. None where that saves little."""
    if chosen == 1 or ranks == 1 or not sum(travelling(shares, replicated)):
        return None
    part = part_once(shares, replicated, ranks, chosen)
    return part if part <= WORTH_ONCE else None


def part_once(shares: tuple[float, ...], replicated: tuple[int, ...], ranks: int, chosen: int) -> float:
    """How many tokens travel each once to a rank, as a part of the rows that would."""
    rows, tokens = (math.fsum(sent_parts(shares, replicated, ranks, many)) for many in (1, chosen))
    return tokens / rows


def travelling(shares: Sequence[float], replicated: Collection[int]) -> tuple[float, ...]:
    """The part of all rows that travels to each expert."""
    return tuple(0.0 if expert in replicated else share for expert, share in enumerate(shares))


def busiest_rows(shares: Sequence[float], replicated: Collection[int], ranks: int, rows: int) -> BusiestRows:
    """Where rows of replicated experts, and those of no expert among these, stay at home, as many at every rank."""
    travel = travelling(shares, replicated)
    home = max(0.0, 1.0 - math.fsum(travel)) / ranks
    received = busiest_part(travel, ranks, rows)
    return BusiestRows(received + home, received, fullest_part(travel, ranks, rows) + home)


def _below(value: float, part: float, rows: int) -> float:
    """How likely a rank that expects a part of the rows has at most `value` of them."""
    spread = math.sqrt(part * (1.0 - part) / max(rows, 1))
    return float(value >= part) if spread == 0.0 else 0.5 * (1.0 + math.erf((value - part) / (spread * math.sqrt(2.0))))
