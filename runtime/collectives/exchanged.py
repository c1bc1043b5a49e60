"""What is exchanged: each collective as a generator that yields its exchanges, posted, and returns its result.

    scattered(communicator, tag, everyone, blocks, sum)     yields one exchange: block i goes to place i
                                                            returns this place's block, added up over all places

What comes behind a `yield` runs when that exchange is through. Blocks are flat; every exchange has a tag of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias

import torch

from autopar.cost_models.gloo import takes_two_levels
from autopar.runtime.collectives.communicator import Communicator
from autopar.runtime.collectives.exchange import Exchange

Collective: TypeAlias = Generator[Exchange, None, torch.Tensor]
Reduce: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""(places, elements) -> (elements,)."""


def two_levels(communicator: Communicator, nbytes: int) -> bool:
    """Whether a collective of a buffer of `nbytes` goes inside of the nodes and across them one after the other."""
    return takes_two_levels(nbytes, communicator.num_nodes, communicator.size // communicator.num_nodes)


def shaped(collective: Collective, shape: Sequence[int]) -> Collective:
    """The same collective, its result in this shape."""
    return (yield from collective).view(shape)


def then(collective: Collective, result: torch.Tensor) -> Collective:
    """The same collective, which writes `result`."""
    yield from collective
    return result


def exchanged(
    communicator: Communicator, tag: int, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
) -> Collective:
    """A block to and from every place."""
    place = communicator.place
    others = [other for other in communicator.everyone if other != place]
    exchange = communicator.exchange(
        tag, {other: sent[other] for other in others}, {other: received[other] for other in others}
    )
    received[place].copy_(sent[place])
    yield exchange
    return received[place]


def scattered(
    communicator: Communicator,
    tag: int,
    places: Sequence[int],
    blocks: Sequence[torch.Tensor],
    reduce: Reduce,
) -> Collective:
    """This rank's block, reduced over `places`: a flat tensor. blocks: one per place, on every rank of equal sizes."""
    turn = places.index(communicator.place)
    own = blocks[turn]
    rows = own.new_empty((len(places), own.numel()))
    exchange = communicator.exchange(
        tag,
        {place: block for place, block in zip(places, blocks, strict=True) if place != communicator.place},
        {place: row for place, row in zip(places, rows, strict=True) if place != communicator.place},
    )
    rows[turn].copy_(own)
    yield exchange
    return reduce(rows)


def gathered(
    communicator: Communicator, tag: int, places: Sequence[int], own: torch.Tensor, blocks: Sequence[torch.Tensor]
) -> Collective:
    """Every place's `own`, written to `blocks`."""
    others = {place: block for place, block in zip(places, blocks, strict=True) if place != communicator.place}
    exchange = communicator.exchange(tag, dict.fromkeys(others, own), others)
    blocks[places.index(communicator.place)].copy_(own)
    yield exchange
    return own


def gathered_by_doubling(communicator: Communicator, tag: int, own: torch.Tensor) -> Collective:
    """Every place's flat `own`, a row each, in rounds of one message each way that move twice as many rows as the one
    before (Bruck's algorithm): 6 messages on 64 ranks. For few bytes."""
    size, place = communicator.size, communicator.place
    rows = own.new_empty((size, own.numel()))  # of this place, the next one, ...
    rows[0] = own
    count = 1
    while count < size:
        more = min(count, size - count)
        behind, ahead = (place - count) % size, (place + count) % size
        yield communicator.exchange(tag, {behind: rows[:more]}, {ahead: rows[count : count + more]})
        count += more
    return rows.roll(place, 0)


def scattered_on_nodes(communicator: Communicator, tag: int, flat: torch.Tensor, reduce: Reduce) -> Collective:
    """As `scattered` over everyone: first inside of each node, all nodes' blocks at once, then across."""
    nodes, inside = communicator.num_nodes, communicator.inside
    parts = flat.view(nodes, len(inside), -1).transpose(0, 1).contiguous()
    mine = yield from scattered(communicator, tag, inside, parts.view(len(inside), -1).unbind(), reduce)
    return (yield from scattered(communicator, tag + 1, communicator.across, mine.chunk(nodes), reduce))


def gathered_on_nodes(communicator: Communicator, tag: int, own: torch.Tensor, result: torch.Tensor) -> Collective:
    """As `gathered` of everyone: first across nodes, then inside of each all that its ranks have."""
    nodes, inside = communicator.num_nodes, communicator.inside
    column = own.new_empty((nodes, own.numel()))
    yield from gathered(communicator, tag, communicator.across, own, column.unbind())
    columns = own.new_empty((len(inside), nodes, own.numel()))
    yield from gathered(communicator, tag + 1, inside, column, columns.unbind())
    result.view(nodes, len(inside), -1).copy_(columns.transpose(0, 1))
    return result


def reduced_copies(
    communicator: Communicator,
    tag: int,
    x: torch.Tensor,
    result: torch.Tensor,
    reduce: Reduce,
) -> Collective:
    """All copies of `x` from everyone, reduced here, written to `result`."""
    rows = x.new_empty((communicator.size, x.numel()))
    yield from gathered(communicator, tag, communicator.everyone, x.view(-1), rows.unbind())
    result.view(-1).copy_(reduce(rows))
    return result


def all_reduced(
    communicator: Communicator,
    tag: int,
    x: torch.Tensor,
    result: torch.Tensor,
    reduce: Reduce,
    by_nodes: bool,
) -> Collective:
    """A reduce_scatter, then an all_gather. `result` may be `x`: what was sent may change once it has gone. by_nodes:
    inside of the nodes first, then across."""
    flat, target, size = x.view(-1), result.view(-1), communicator.size
    if not by_nodes:
        cuts = [turn * flat.numel() // size for turn in range(size + 1)]
        lengths = [end - begin for begin, end in itertools.pairwise(cuts)]
        own = yield from scattered(communicator, tag, communicator.everyone, torch.split(flat, lengths), reduce)
        yield from gathered(communicator, tag + 1, communicator.everyone, own, torch.split(target, lengths))
        return result
    grown = math.ceil(flat.numel() / size) * size
    padded = torch.nn.functional.pad(flat, (0, grown - flat.numel()))
    own = yield from scattered_on_nodes(communicator, tag, padded, reduce)
    whole = target if grown == flat.numel() else padded
    yield from gathered_on_nodes(communicator, tag + 2, own, whole)
    if whole is padded:
        target.copy_(padded[: flat.numel()])
    return result
