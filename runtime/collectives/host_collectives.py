"""Collectives of CPU tensors, made of exchanges, that send no byte twice: gloo's own send more, or wait more often.

    started = start_reduce_scatter(x, "sum", 4, "7", "head/linear#0/bwd")     ...     wait(started)

Every rank sends every other one its block at once, and adds up what came: (n-1)/n of the buffer and one round, where
torch's reduce_scatter is a ring all_reduce of 2 (n-1)/n and 2 (n-1) rounds. An all_reduce is a reduce_scatter and an
all_gather; a small one gathers all copies. Ranks on several nodes first add up inside of their node, so that a node
sends each byte once (`cost_models/gloo.py` says when, and prices the same).

The first exchange of a collective (`exchanged.py`) is posted where the collective starts; the result is taken where it
is waited for, and what lies between runs in the communicator's threads, one for every round: while one collective
waits for its second round, the next goes on to its own.
Sums are taken in the order of ranks, in fp32 for narrower floats, each element by one rank: all have equal bits. A
`FOLDED` sum is that of logical shards: folded in the dtype of what is added, by every rank at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from autopar.cost_models.gloo import gathers_all_copies
from autopar.ops.folded_sums import folded_sum
from autopar.runtime.collectives.communicator import Communicator, communicator_of
from autopar.runtime.collectives.exchange import Exchange, LostPeersError
from autopar.runtime.collectives.exchanged import (
    Collective,
    Reduce,
    all_reduced,
    exchanged,
    gathered,
    gathered_by_doubling,
    gathered_on_nodes,
    reduced_copies,
    scattered,
    scattered_on_nodes,
    shaped,
    then,
    two_levels,
)
from autopar.runtime.collectives.flight_record import RECORD
from autopar.runtime.collectives.lost_ranks import Waiting, lost_ranks
from autopar.runtime.collectives.progress import HERE

FOLDED = "folded_sum"
"""A sum whose order does not depend on how many ranks add up how much before (`ops/folded_sums.py`), nor on nodes."""
REDUCTIONS: Mapping[str, Reduce] = {
    "sum": lambda rows: torch.sum(rows, 0, dtype=rows.dtype),
    FOLDED: folded_sum,
    "avg": lambda rows: torch.mean(rows, 0, dtype=rows.dtype),
    "max": lambda rows: torch.amax(rows, 0),
    "min": lambda rows: torch.amin(rows, 0),
    "product": lambda rows: torch.prod(rows, 0, dtype=rows.dtype),
}


class Started:
    """A collective on its way; `wait` hands out its result, once."""

    def __init__(
        self, kind: str, communicator: Communicator, operator: str, collective: Collective, nbytes: int
    ) -> None:
        """Post the first exchange. nbytes: of what this rank puts in. Raises RankLostError where a peer is gone."""
        self._flight = RECORD.begin(kind, operator, communicator.ranks, nbytes)
        self._waiting = Waiting(kind=kind, operator=operator, ranks=communicator.ranks, place=communicator.place)
        self._communicator = communicator
        self._collective = collective
        self._rest: Future[torch.Tensor] | None = None
        try:
            with torch.no_grad():
                self._exchange: Exchange | None = next(collective)
        except LostPeersError as error:
            raise lost_ranks(self._waiting, error) from error

    def go_on(self) -> Started:
        """Let the communicator's threads do what comes behind the first exchange."""
        self._rest = Future()
        inference = torch.is_inference_mode_enabled()  # of this thread: what was made under it changes only under it
        self._communicator.later(0, partial(self._next_round, self._rest, 0, inference))
        return self

    def _next_round(self, rest: Future[torch.Tensor], number: int, inference: bool) -> None:
        """One round; the next one is for the thread behind this."""
        try:
            with torch.inference_mode(inference):
                result = self._round()
        except Exception as error:  # of whatever class: it belongs to the one who waits
            rest.set_exception(error)
            return
        if result is None:
            self._communicator.later(number + 1, partial(self._next_round, rest, number + 1, inference))
        else:
            rest.set_result(result)

    def wait(self) -> torch.Tensor:
        """The result. Raises RankLostError that names this collective's operator and the ranks that are missing."""
        begin = time.perf_counter()
        HERE.collective = self._flight
        try:
            result = self._finish() if self._rest is None else self._rest.result()
            RECORD.end(self._flight)
            return result
        except LostPeersError as error:
            raise lost_ranks(self._waiting, error) from error
        finally:
            self._communicator.waited_seconds += time.perf_counter() - begin

    def _finish(self) -> torch.Tensor:
        while (result := self._round()) is None:
            pass
        return result

    def _round(self) -> torch.Tensor | None:
        """Wait for the exchange that is on its way, and post the next one; the result behind the last."""
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        exchange.wait(self._communicator.timeout)
        try:
            with torch.no_grad():
                self._exchange = next(self._collective)
        except StopIteration as end:
            result: torch.Tensor = end.value
            return result
        return None


def wait(started: Started) -> torch.Tensor:
    """The result of a collective that was started."""
    return started.wait()


def start_all_reduce(x: torch.Tensor, reduction: str, group: str, operator: str) -> Started:
    """The reduction of all ranks' `x`, in a tensor of its own."""
    return _all_reduce(x, torch.empty_like(x, memory_format=torch.contiguous_format), reduction, group, operator)


def start_all_reduce_in_place(x: torch.Tensor, reduction: str, group: str, operator: str) -> Started:
    """The reduction of all ranks' `x`, written to `x`, which is contiguous."""
    return _all_reduce(x, x, reduction, group, operator)


def _all_reduce(x: torch.Tensor, result: torch.Tensor, reduction: str, group: str, operator: str) -> Started:
    communicator = communicator_of(group)
    x = x.detach().contiguous()
    if gathers_all_copies(x.nbytes, communicator.size):
        made = reduced_copies(communicator, communicator.first_tag(), x, result, REDUCTIONS[reduction])
        return Started("all_reduce", communicator, operator, made, x.nbytes)
    by_nodes = reduction != FOLDED and two_levels(communicator, x.nbytes)
    made = all_reduced(communicator, communicator.first_tag(), x, result, REDUCTIONS[reduction], by_nodes)
    return Started("all_reduce", communicator, operator, made, x.nbytes).go_on()


def start_reduce_scatter(x: torch.Tensor, reduction: str, ranks: int, group: str, operator: str) -> Started:
    """This rank's part of the reduction of all `x`, cut along dim 0 into equal parts."""
    communicator, x = communicator_of(group), x.detach().contiguous()
    shape = (x.shape[0] // ranks, *x.shape[1:])
    flat, reduce, tag = x.view(-1), REDUCTIONS[reduction], communicator.first_tag()
    if reduction == FOLDED or not two_levels(communicator, x.nbytes):
        one = scattered(communicator, tag, communicator.everyone, flat.chunk(ranks), reduce)
        return Started("reduce_scatter", communicator, operator, shaped(one, shape), x.nbytes)
    two = scattered_on_nodes(communicator, tag, flat, reduce)
    return Started("reduce_scatter", communicator, operator, shaped(two, shape), x.nbytes).go_on()


def start_all_gather(x: torch.Tensor, ranks: int, group: str, operator: str) -> Started:
    """All ranks' `x`, which have equal shapes, one behind the other along dim 0."""
    communicator, x = communicator_of(group), x.detach().contiguous()
    result, tag = x.new_empty((ranks * x.shape[0], *x.shape[1:])), communicator.first_tag()
    if not two_levels(communicator, result.nbytes):
        one = gathered(communicator, tag, communicator.everyone, x.view(-1), result.view(-1).chunk(ranks))
        return Started("all_gather", communicator, operator, then(one, result), x.nbytes)
    two = gathered_on_nodes(communicator, tag, x.view(-1), result.view(-1))
    return Started("all_gather", communicator, operator, then(two, result), x.nbytes).go_on()


def start_small_all_gather(row: torch.Tensor, group: str, operator: str) -> Started:
    """All ranks' flat `row`, a row each: few messages per rank on any number of ranks."""
    communicator = communicator_of(group)
    made = gathered_by_doubling(communicator, communicator.first_tag(), row)
    return Started("all_gather", communicator, operator, made, row.nbytes)


def start_all_to_all(x: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: str, op: str) -> Started:
    """Rows of `x` to every rank (`sent` counts them), rows of every rank (`received`) one behind the other."""
    communicator, x = communicator_of(group), x.detach().contiguous()
    result = x.new_empty((sum(received), *x.shape[1:]))
    made = exchanged(
        communicator, communicator.first_tag(), torch.split(x, list(sent)), torch.split(result, list(received))
    )
    return Started("all_to_all", communicator, op, then(made, result), x.nbytes)
