"""Capped rows: every rank sends as many rows to every expert, and gets them back; what has no place is dropped.

    two ranks, experts 0 and 1 on rank 0, 2 on rank 1, two places     rank 0 has rows of experts [2, 0, 7, 0, 0]

    order, place, ... = capped_order(ids, ...)     rows 1, 3 | none, none || 0, none | none, none
    y = all_to_all(rows_at(x, order))              rank 0: its rows 1, 3 | zeros || what rank 1 sends to these experts
    rows_at(y, regrouped)                          by expert: 1, 3, those of rank 1 | zeros, zeros, ...

Rows of an expert take its places in their order: row 4 found none, and is as a row of no expert (2): zero in every
product, and in its gradient. Ranks send to as many experts as the rank with most of them has. All sizes are known
before a row is: nothing is exchanged but rows, and no device is waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from autopar.ops.dispatch import by_experts, sorted_by

_Totals: TypeAlias = dict[tuple[str, int, torch.device], Tensor]
_totals: _Totals = {}
"""(module, experts, device) -> rows that chose each expert, and those of them that were dropped (2, experts), of all
calls so far. Device tensors that calls add to: so do graphs that were recorded."""


@torch.library.custom_op(
    "autopar::capped_order",
    mutates_args=(),
    schema="(Tensor expert_ids, int start, int num_experts, int block, int ranks, int places, int held, str module, "
    "int[] order=[]) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def capped_order(
    expert_ids: Tensor,
    start: int,
    num_experts: int,
    block: int,
    ranks: int,
    places: int,
    held: int,
    module: str,
    order: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Row of every place by rank, expert and place (S,), S = ranks * block * places; place of every row (T,); the order
    by expert of what came (S,), and the place of each in it (S,); rows per expert held (held,).

    expert_ids (T,) int64, of the experts [start, start + num_experts), each with so many places; held: experts of this
    rank. A place without a row says T, a row without a place S: behind the last, for which `rows_at` has zeros. Rows of
    `module` are counted for `counted_drops`, by expert of the model; order: of `Dispatch`.
    """
    rows, device = len(expert_ids), expert_ids.device
    expert = expert_ids - start
    keys = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    _, turn, counts = sorted_by(keys, num_experts + 1)
    _count(module, by_experts(counts[:num_experts], order), places)
    turn = turn - (counts.cumsum(0) - counts)[keys]
    size = ranks * block * places
    place = torch.where((keys < num_experts) & (turn < places), keys * places + turn, size)
    taken = torch.full((size + 1,), rows, device=device).scatter_(0, place, torch.arange(rows, device=device))[:-1]
    regrouped, ungrouped = (
        torch.arange(size, device=device).view(*outer, places).transpose(0, 1).reshape(-1)
        for outer in ((ranks, block), (block, ranks))
    )
    return taken, place, regrouped, ungrouped, torch.full((held,), ranks * places, device=device)


@capped_order.register_fake
def _(
    expert_ids: Tensor,
    start: int,
    num_experts: int,
    block: int,
    ranks: int,
    places: int,
    held: int,
    module: str,
    order: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    taken, regrouped, ungrouped = (expert_ids.new_empty(ranks * block * places) for _ in range(3))
    return taken, torch.empty_like(expert_ids), regrouped, ungrouped, expert_ids.new_empty(held)


def _count(module: str, counts: Tensor, places: int) -> None:
    key = module, len(counts), counts.device
    if key not in _totals:
        _totals[key] = counts.new_zeros(2, len(counts))
    _totals[key].add_(torch.stack([counts, (counts - places).clamp(min=0)]))


@contextlib.contextmanager
def counted_drops() -> Iterator[dict[str, Tensor]]:
    """A dictionary that holds, behind the context: module -> rows of this rank that chose each expert, and those of
    them that were dropped (2, experts), of all calls inside. They are read at the end alone."""
    before = {key: total.clone() for key, total in _totals.items()}
    found: dict[str, Tensor] = {}
    yield found
    for key, total in _totals.items():
        counted = (total - before.get(key, 0)).cpu()
        if counted.any():
            found[key[0]] = counted
