"""Tokens that travel once to every rank that has some of their experts, and come back as one sum from there.

    token 0 wants experts 0 and 1 of rank 0, token 1 experts 1 and 2        two experts to a rank: three rows, not four

    rows in the order of `dispatch_order`        0: t0 e0, 1: t0 e1, 2: t1 e1 | 3: t1 e2
    pairs of rank and token                      t0, t1 | t1                                      `token_pairs`
    places in the pairs of their rank            0, 0, 1 | 0                                      of the rows above
    what has come, by row                        rows_at(tokens that came, index)                 `received_tokens`
    sums there, and then at home                 summed_rows(rows, index, order, lengths)

Who gets which token is exchanged as numbers, one for each row. Sums are made in a fixed order. In the second of two
hops the tokens that came in the first one take the place of those at home (`tokens_that_came`, `pairs_of_tokens`).
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op(
    "autopar::token_pairs",
    mutates_args=(),
    schema="(Tensor order, Tensor counts, int ranks, int each) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def token_pairs(order: Tensor, counts: Tensor, ranks: int, each: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Token of every pair of a rank and a token with rows there, by rank and token (N,), of which as many count as
    there are pairs; place of the pair of every ordered row among those of its rank (N,) int32; order of the pairs by
    token (N,); pairs of every token (T,); pairs of every rank (ranks,).

    order (N,), counts: of `dispatch_order`; row n is of token n // each.
    """
    return _pairs(order.div(each, rounding_mode="floor"), counts, ranks, len(order) // each)


def pairs_of_tokens(
    token: Tensor, order: Tensor, counts: Tensor, ranks: int, sizes: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `token_pairs`, of rows that came with their tokens (N,); sizes: of these, by `pair_sizes`."""
    return _pairs(token[order], counts, ranks, int(sizes[1].sum()))


def _pairs(
    token: Tensor, counts: Tensor, ranks: int, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `token_pairs`. token (N,): of every ordered row, one of `count`."""
    rows = len(token)
    rank = torch.arange(ranks, device=token.device)
    rank = rank.repeat_interleave(counts.view(ranks, -1).sum(1), output_size=rows)
    hit = torch.zeros(ranks, count, dtype=torch.bool, device=token.device)
    hit.view(-1).scatter_(0, rank * count + token, True)
    number = (hit.view(-1).cumsum(0) - 1).view(hit.shape)
    of_rank = hit.sum(1)
    tokens = torch.arange(count, device=token.device).expand_as(hit)
    pair_tokens = _first(hit, number, tokens, rows)
    starts = of_rank.cumsum(0) - of_rank
    place = (number[rank, token] - starts[rank]).to(torch.int32)
    by_token = hit.t()
    back = (by_token.reshape(-1).cumsum(0) - 1).view(by_token.shape)
    return pair_tokens, place, _first(by_token, back, number.t(), rows), hit.sum(0), of_rank


def _first(hit: Tensor, number: Tensor, values: Tensor, size: int) -> Tensor:
    """values where hit, at their number (size,)."""
    found = torch.zeros(size + 1, dtype=torch.int64, device=hit.device)
    return found.scatter_(0, torch.where(hit, number, size).reshape(-1), values.reshape(-1))[:size].clone()


@token_pairs.register_fake
def _(order: Tensor, counts: Tensor, ranks: int, each: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = torch.empty_like(order)
    place, tokens = torch.empty_like(order, dtype=torch.int32), order.new_empty(len(order) // each)
    return rows, place, rows.clone(), tokens, order.new_empty(ranks)


def with_pairs(counts: Tensor, pairs: Tensor) -> Tensor:
    """Counts of `dispatch_order`, and behind those of every rank its pairs (ranks * (W + 1),)."""
    return torch.cat([counts.view(len(pairs), -1), pairs.unsqueeze(1)], 1).reshape(-1)


def without_pairs(table: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Inverse of `with_pairs`."""
    by_rank = table.view(ranks, -1)
    return by_rank[:, :-1].reshape(-1), by_rank[:, -1].contiguous()


def pair_sizes(pairs: Tensor, came: Tensor) -> Tensor:
    """Pairs that go to every rank, and that come from it (2, ranks), on the host."""
    return torch.stack([pairs, came]).cpu()


def tokens_that_came(places: Tensor, table: Tensor, came: Tensor) -> Tensor:
    """The pair of every row, in the order in which they came (R,). Arguments: of `received_tokens`."""
    starts = came.cumsum(0) - came
    return places + starts.repeat_interleave(table.view(len(came), -1).sum(1), output_size=len(places))


def received_tokens(
    places: Tensor, table: Tensor, came: Tensor, sizes: Tensor, regrouped: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The pair of every row in the order of experts (R,); order of these rows by pair (R,); rows of every pair (P,).

    places: of the rows that came, as `token_pairs` says; table, came: without and of pairs, by rank from where they
    came; sizes: of `pair_sizes`; regrouped: of `received_order`.
    """
    index = tokens_that_came(places, table, came)[regrouped]
    lengths = torch.zeros(int(sizes[1].sum()), dtype=torch.int64, device=places.device)
    return index, index.argsort(stable=True), lengths.scatter_add_(0, index, torch.ones_like(index))


def first_pairs(index: Tensor, sizes: Tensor) -> Tensor:
    """As many of an index (N,) as there are pairs that go."""
    return index[: int(sizes[0].sum())]


def summed_rows(rows: Tensor, index: Tensor, order: Tensor, lengths: Tensor) -> Tensor:
    """Sums of the rows (R, ...) that have the same index (R,), in this order: (P, ...). order (R,): of the rows by
    their index; lengths (P,): how many have each.

    CPUs add one row after the other, in a tenth of the time of torch's sum of segments; on GPUs that would be in any
    order.
    """
    if rows.device.type == "cpu" or not len(lengths) or not len(order):
        return rows.new_zeros(len(lengths), *rows.shape[1:]).index_add_(0, index, rows)
    ordered = rows.index_select(0, order)
    return torch.segment_reduce(ordered, "sum", lengths=lengths, axis=0, unsafe=True, initial=0.0)
