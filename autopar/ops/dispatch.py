"""Dispatch: rows travel to the rank that holds their expert, and back, as expert parallelism does.

    two ranks, experts 0 and 1 on rank 0, 2 on rank 1        rank 0 has rows of experts [2, 0, 7], rank 1 of [1, 2]

    order, places, counts = dispatch_order(ids, there)       rank 0: rows 1, 2 | 0; counts [1, 0, 1 | 1, 0, 0]
    table = all_to_all(counts)                               rank 0: [1, 0, 1 | 0, 1, 0]
    sizes = row_sizes(counts, table, ranks)                  rank 0: sends [2, 1], receives [2, 1]
    y = all_to_all(rows_at(x, order), sizes)                 rank 0: its rows of experts 0, none | that of expert 1
    regrouped, back, held = received_order(table, ...)       by expert: experts 0, 1, none; held [1, 1]

A rank sorts its rows by the rank of their expert, by expert for each rank. Rows of no expert here (7) stay at home,
behind those of the own experts: a count for each rank says how many. Rows of replicated experts stay at home, too, in
front of these: every rank holds the weights of those experts behind the ones of its own. Sizes are exchanged first,
then rows: nothing is padded and nothing is dropped. Sizes of messages are numbers of the host, for which a device is
waited for.

Over two groups, one inside the other, a row goes in two hops (`Hop`): to the rank of its own place in the part of the
outer group that has its expert, as if that part were one rank with all its experts; the rows that came, whose experts
are then known (`experts_that_came`), go on over the inner group alike. Between nodes goes then what a node wants once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Hop(NamedTuple):
    """One exchange of rows over a group, to each of whose ranks belong `block` experts, the last one what is left;
    position: of this rank in it.

    Of rows that travel is said, which computes nothing: how many times those of the mean rank the rank with most of
    them expects (busiest), memory is planned for (fullest), and what part of the busiest came to experts of its own
    (travels)."""

    group: str
    ranks: int
    position: int
    block: int
    busiest: float = 1.0
    travels: float = 1.0
    fullest: float = 1.0


class Dispatch(NamedTuple):
    """Where experts are: the group holds `experts` of them from `start` on, each of its `ranks` `block`, the last one
    what is left; position: of this rank in the group; hops: how rows get there, over the group, or over outer axes of
    it and then the inner ones; replicated: experts among them whose rows stay at home; shares: what part of all rows
    goes to each expert, which computes nothing; room: rows that every rank sends to every expert (`capped_rows.py`),
    None: as many as it has; fewest: rows at home of the rank with fewest; order: the expert of the model at every
    position of the group, which are counted as experts here (`placed_ids`), empty where these are the same."""

    start: int
    experts: int
    block: int
    ranks: int
    position: int
    group: str
    hops: tuple[Hop, ...]
    replicated: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    room: int | None = None
    fewest: int = 0
    order: tuple[int, ...] = ()

    @property
    def places(self) -> list[int]:
        """Of every replicated expert its place among those that this rank holds, -1 where another one does."""
        first = self.start + self.position * self.block
        held = range(first, min(first + self.block, self.start + self.experts))
        return [expert - first if expert in held else -1 for expert in self.replicated]


_counters: list[dict[str, list[Tensor]]] = []
_tables: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
"""(numbers, device) -> the same numbers there, of orders of experts."""
_most: dict[str, tuple[int, int]] = {}
"""Module -> the most rows that came at once and for how many memory was planned, where those are more."""


@torch.library.custom_op(
    "autopar::placed_ids", mutates_args=(), schema="(Tensor expert_ids, int[] places) -> Tensor"
)
def placed_ids(expert_ids: Tensor, places: Sequence[int]) -> Tensor:
    """The place of the expert of every row (T,); other ids, of no expert, stay. places: of every expert."""
    is_expert = (expert_ids >= 0) & (expert_ids < len(places))
    found = _table(places, expert_ids.device)[expert_ids.clamp(0, len(places) - 1)]
    return torch.where(is_expert, found, expert_ids)


def _table(numbers: Sequence[int], device: torch.device) -> Tensor:
    """The same numbers on a device, brought there once."""
    key = tuple(numbers), device
    if key not in _tables:
        _tables[key] = torch.tensor(key[0], dtype=torch.int64, device=device)
    return _tables[key]


@placed_ids.register_fake
def _(expert_ids: Tensor, places: Sequence[int]) -> Tensor:
    return torch.empty_like(expert_ids)


@torch.library.custom_op(
    "autopar::dispatch_order",
    mutates_args=(),
    schema="(Tensor expert_ids, int start, int num_experts, int block, int ranks, int position, int[] replicated) "
    "-> (Tensor, Tensor, Tensor)",
)
def dispatch_order(
    expert_ids: Tensor, start: int, num_experts: int, block: int, ranks: int, position: int, replicated: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Order of the rows by rank and expert (T,); place of every row in it (T,); rows per rank and expert, of each rank
    those of the replicated ones behind its own, and those of no expert last (ranks * (block + len(replicated) + 1),).

    expert_ids (T,) int64; rank r of the group holds the experts [start + r block, start + (r + 1) block), fewer if
    they end before, at `start + num_experts`. Rows of replicated and of other ids stay at `position`.
    """
    buckets = block + len(replicated) + 1
    expert, own = expert_ids - start, position * buckets + block
    travels = (expert >= 0) & (expert < num_experts)
    there = expert + expert.div(block, rounding_mode="floor") * (buckets - block)
    keys = torch.where(travels, there, own + len(replicated))
    for place, one in enumerate(replicated):
        keys.masked_fill_(expert_ids == one, own + place)
    return sorted_by(keys, ranks * buckets)


def sorted_by(keys: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order of the rows (T,) by their keys, numbers below `count`; place of every row in it (T,); rows per key."""
    counts = torch.zeros(count, dtype=torch.int64, device=keys.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    order = keys.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return order, places, counts


@dispatch_order.register_fake
def _(
    expert_ids: Tensor, start: int, num_experts: int, block: int, ranks: int, position: int, replicated: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    counts = expert_ids.new_empty(ranks * (block + len(replicated) + 1))
    return torch.empty_like(expert_ids), torch.empty_like(expert_ids), counts


def row_sizes(
    counts: Tensor,
    table: Tensor,
    ranks: int,
    experts: int,
    replicated: Sequence[int],
    module: str,
    planned: int,
    order: Sequence[int] = (),
) -> Tensor:
    """Rows that go to every rank, and that come from it (2, ranks), on the host; counts, table: of `dispatch_order`,
    and what the others sent of theirs. Waits for the device. experts: of the group, 0 where rows were counted before,
    replicated: which of them, counted from 0 on, order: of `Dispatch`, and module: whose these are, for `counted_rows`;
    planned: for how many memory is, for `beyond_memory`."""
    by_rank = torch.stack([counts, table]).cpu().view(2, ranks, -1)
    if _counters and experts:
        block = by_rank.shape[2] - len(replicated) - 1
        rows = by_rank[0, :, :block].reshape(-1)[:experts].clone()
        rows[list(replicated)] = by_rank[0, :, block:-1].sum(0)
        rows = by_experts(rows, order)
        for counter in _counters:
            counter.setdefault(module, []).append(rows)
    sizes = by_rank.sum(2)
    if (came := int(sizes[1].sum())) > max(planned, _most.get(module, (0, 0))[0]):
        _most[module] = came, planned
    return sizes


def by_experts(values: Tensor, order: Sequence[int]) -> Tensor:
    """Values of every position (..., experts) as those of the experts that lie there, of a group that has all in an
    order; as they are where it has none."""
    if not order:
        return values
    return torch.empty_like(values).index_copy_(-1, _table(order, values.device), values)


def beyond_memory() -> str:
    """Where more rows came to this rank than memory is planned for, in words; empty where that was never so."""
    if not _most:
        return ""
    found = ", ".join(f"{module}: {came:,} for {planned:,}" for module, (came, planned) in _most.items())
    return (
        f"More rows came to the experts of this rank than memory was planned for ({found}). Plan for the load that "
        "there is (expert_load='run.jsonl', a log of StepLog), or with a lower memory_limit=."
    )


@contextlib.contextmanager
def counted_rows() -> Iterator[dict[str, list[Tensor]]]:
    """Within the context, module -> rows of this rank that went to each expert of the group (experts,), per call."""
    counter: dict[str, list[Tensor]] = {}
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


def row_list(sizes: Tensor, received: int) -> list[int]:
    """Of `row_sizes` one side, as collectives take it: what goes (0) or what comes (1)."""
    found: list[int] = sizes[received].tolist()
    return found


def experts_that_came(table: Tensor, sizes: Tensor, ranks: int) -> Tensor:
    """The expert of every row that came, in this order (R,), counted from the first one of this rank; behind those are
    the replicated ones, and no expert. table, sizes: of `row_sizes`."""
    by_rank = table.view(ranks, -1)
    buckets = torch.arange(by_rank.shape[1], device=table.device).expand_as(by_rank)
    return buckets.reshape(-1).repeat_interleave(table, output_size=int(sizes[1].sum()))


def received_order(
    table: Tensor, sizes: Tensor, ranks: int, held: int, replicated: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Order by expert of the rows that came (R,); place of each in it (R,); rows per expert held, and behind them per
    replicated one (held + replicated,)."""
    order = experts_that_came(table, sizes, ranks).argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    each = table.view(ranks, -1).sum(0)
    return order, places, torch.cat([each[:held], each[len(each) - replicated - 1 : -1]])


def replicas_held(weight: Tensor, places: Sequence[int]) -> Tensor:
    """Matrices of replicated experts (len(places), ...) by their places in weight (E, ...), zeros for a place of -1."""
    found = weight.new_zeros(len(places), *weight.shape[1:])
    for number, place in enumerate(places):
        if place >= 0:
            found[number] = weight[place]
    return found


def with_replicas(found: Tensor, replicas: Tensor, places: Sequence[int]) -> Tensor:
    """Inverse of `replicas_held`, for gradients: the first of found (E + len(places), ...), which are of the own
    experts, with those of replicas at their places (E, ...)."""
    own = found[: len(found) - len(places)].clone()
    for number, place in enumerate(places):
        if place >= 0:
            own[place] = replicas[number]
    return own


def filled_rows(rows: Tensor, shape: list[int], value: float, dtype: torch.dtype) -> Tensor:
    """As many rows of `shape` as `rows` has, all of one value."""
    return torch.full((rows.shape[0], *shape), value, dtype=dtype, device=rows.device)
