"""Where experts lie: which rank has which, so that the busiest one has few rows (SmartMoE, USENIX ATC 2023).

    placed_experts((0.4, 0.3, 0.2, 0.1), (2,))                 order (0, 3, 1, 2): ranks have 0.5 each, not 0.7 and 0.3
    placed_experts(shares, (2, 4), before)                     as even over 2 nodes, then over the 4 ranks of each

Every rank has as many experts. The order says what lies at each position, rank by rank: position i holds expert
order[i]. Of all ways to name the ranks that have these experts, nearly the one that moves fewest from where they lie
now is taken, and experts of a rank ascend.

    least       max over ranks of the sum of their shares, over all partitions into equal numbers
    bounded by  the mean; the largest share with the smallest ones that fill its rank
    found by    largest first to the lightest rank with room, then exchanges of two experts while they help; of few
                experts, branch and bound, which also proves it
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

WORTH_MOVING = 1e-3
"""Part of the busiest rank's rows that another order must save."""
MOST_BRANCHES = 20_000
"""Of branch and bound, for one group of ranks: 16 experts on 4 ranks take less than a tenth of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedExperts:
    """order: the expert at every position; busiest: the part of all rows that the rank with most gets, before: in the
    order that was; bound: than which no order has less."""

    order: tuple[int, ...]
    busiest: float
    before: float
    bound: float

    @property
    def moves(self) -> bool:
        """Whether it is worth an exchange of weights."""
        return self.busiest < (1.0 - WORTH_MOVING) * self.before


def placed_experts(shares: Sequence[float], ranks: Sequence[int], before: Sequence[int] = ()) -> PlacedExperts:
    """The order in which experts are placed by their shares of all rows; that of `before` where none is better.

    ranks: of the group, or of every level of it, outer ones first; their product divides the number of experts. before:
    the order in which they lie, by default that of the model.
    """
    count = math.prod(ranks)
    old = tuple(before) or tuple(range(len(shares)))
    assert len(shares) % count == 0, f"{len(shares)} experts on {count} ranks"
    was = busiest_share(shares, old, count)
    order = tuple(_over_levels(shares, old, list(ranks)))
    found = PlacedExperts(
        order=order, busiest=busiest_share(shares, order, count), before=was, bound=least_share(shares, count)
    )
    return found if found.moves else PlacedExperts(order=old, busiest=was, before=was, bound=found.bound)


def busiest_share(shares: Sequence[float], order: Sequence[int], ranks: int) -> float:
    """The part of all rows that the rank with most gets."""
    return max(math.fsum(shares[expert] for expert in block) for block in blocks(order, ranks))


def least_share(shares: Sequence[float], ranks: int) -> float:
    """What the rank with most gets at least, whatever the order."""
    each, ascending = len(shares) // ranks, sorted(shares)
    return max(math.fsum(shares) / ranks, ascending[-1] + math.fsum(ascending[: each - 1]))


def blocks(order: Sequence[int], ranks: int) -> list[Sequence[int]]:
    """What every rank has of an order."""
    each = len(order) // ranks
    return [order[start : start + each] for start in range(0, len(order), each)]


def places_of(order: Sequence[int]) -> tuple[int, ...]:
    """Inverse: the position of every expert."""
    found = [0] * len(order)
    for place, expert in enumerate(order):
        found[expert] = place
    return tuple(found)


def _over_levels(shares: Sequence[float], old: Sequence[int], ranks: list[int]) -> Iterator[int]:
    """Experts of an order in a better one, over the outermost level first."""
    parts = _named(_partition({expert: shares[expert] for expert in old}, ranks[0]), blocks(old, ranks[0]))
    for part, was in zip(parts, blocks(old, ranks[0]), strict=True):
        stay = {*part} & {*was}
        arrived = iter(sorted({*part} - stay))
        mine = [expert if expert in stay else next(arrived) for expert in was]
        if len(ranks) > 1:
            yield from _over_levels(shares, mine, ranks[1:])
        else:
            yield from sorted(mine)


def _named(parts: list[set[int]], old: Sequence[Sequence[int]]) -> list[set[int]]:
    """The parts in the order of the ranks of which they have most experts."""
    where = {expert: rank for rank, block in enumerate(old) for expert in block}
    common: dict[tuple[int, int], int] = {}
    for part, experts in enumerate(parts):
        for expert in experts:
            common[part, where[expert]] = common.get((part, where[expert]), 0) + 1
    rank_of: dict[int, int] = {}
    for part, rank in sorted(common, key=lambda pair: (-common[pair], pair)):
        if part not in rank_of and rank not in rank_of.values():
            rank_of[part] = rank
    free = iter(sorted({*range(len(parts))} - {*rank_of.values()}))
    named = {rank_of[part] if part in rank_of else next(free): experts for part, experts in enumerate(parts)}
    return [named[rank] for rank in range(len(parts))]


def _partition(shares: Mapping[int, float], ranks: int) -> list[set[int]]:
    """Experts in as many equal parts, the sum of whose shares is nearly equal."""
    if ranks == 1:
        return [set(shares)]
    parts = _exchanged(_largest_first(shares, ranks), shares)
    return _Branches(shares, parts).best


def _largest_first(shares: Mapping[int, float], ranks: int) -> list[set[int]]:
    each = len(shares) // ranks
    parts: list[set[int]] = [set() for _ in range(ranks)]
    room = [(0.0, rank) for rank in range(ranks)]
    for expert in _descending(shares):
        held, rank = heapq.heappop(room)
        parts[rank].add(expert)
        if len(parts[rank]) < each:
            heapq.heappush(room, (held + shares[expert], rank))
    return parts


def _descending(shares: Mapping[int, float]) -> list[int]:
    return sorted(shares, key=lambda expert: (-shares[expert], expert))


def _exchanged(parts: list[set[int]], shares: Mapping[int, float]) -> list[set[int]]:
    """Parts after exchanges of an expert of the fullest one for a lighter one of another, while its sum shrinks."""
    while True:
        sums = [_sum(part, shares) for part in parts]
        fullest = max(range(len(parts)), key=sums.__getitem__)
        swaps = (
            (max(sums[fullest] - less, sums[other] + less), one, two, other)
            for other in range(len(parts))
            if other != fullest
            for one in parts[fullest]
            for two in parts[other]
            if (less := shares[one] - shares[two]) > 0.0
        )
        best = min(swaps, default=None)
        if best is None or best[0] >= sums[fullest] * (1.0 - 1e-9):
            return parts
        _, one, two, other = best
        parts[fullest] ^= {one, two}
        parts[other] ^= {one, two}


def _sum(experts: Iterable[int], shares: Mapping[int, float]) -> float:
    return math.fsum(shares[expert] for expert in experts)


class _Branches:
    """Branch and bound from parts that are known, over a bounded number of branches."""

    def __init__(self, shares: Mapping[int, float], parts: list[set[int]]) -> None:
        self.best, self._shares = parts, shares
        self._value = max(_sum(part, shares) for part in parts)
        self._experts, self._each = _descending(shares), len(shares) // len(parts)
        least = least_share(list(shares.values()), len(parts))
        self._left = 0 if self._value <= least * (1.0 + WORTH_MOVING / 10) else MOST_BRANCHES
        self._descend(0, [set() for _ in parts], [0.0] * len(parts))

    def _descend(self, depth: int, parts: list[set[int]], sums: list[float]) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        if depth == len(self._experts):
            self.best, self._value = [set(part) for part in parts], max(sums)
            return
        expert, tried = self._experts[depth], set()
        for rank in sorted(range(len(parts)), key=sums.__getitem__):
            state = sums[rank], len(parts[rank])
            if len(parts[rank]) == self._each or state in tried or not self._may(sums[rank], len(parts[rank]), depth):
                continue
            tried.add(state)
            parts[rank].add(expert)
            sums[rank] += self._shares[expert]
            self._descend(depth + 1, parts, sums)
            sums[rank] = state[0]
            parts[rank].remove(expert)

    def _may(self, held: float, number: int, depth: int) -> bool:
        """Whether a rank may take the expert of a depth, and the smallest ones until it is full, and stay below."""
        missing = self._each - number - 1
        smallest = self._experts[len(self._experts) - missing :] if missing else ()
        least = held + self._shares[self._experts[depth]] + _sum(smallest, self._shares)
        return least < self._value * (1.0 - 1e-9)


def moved(before: Sequence[int], after: Sequence[int], ranks: int) -> int:
    """How many experts lie on another rank behind a change of their order."""
    pairs = zip(blocks(before, ranks), blocks(after, ranks), strict=True)
    return sum(len({*new} - {*old}) for old, new in pairs)


def runs_of(order: Sequence[int]) -> str:
    """ "0-3, 8, 10-11": ascending experts, as they are said."""
    begins = [at for at, expert in enumerate(order) if at == 0 or expert != order[at - 1] + 1]
    runs = [(order[begin], order[end - 1]) for begin, end in pairwise([*begins, len(order)])]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
