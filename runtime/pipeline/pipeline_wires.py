"""Wires: values between the ranks of a pipeline, in an order that both ends of a wire know beforehand.

    order = message_order(schedule, sends)          both ranks of a pair: send 0F0, send 0F1, receive 1B0, ...

Every rank derives the same total order of all messages from the schedule, played with passes of equal length. Between
two ranks, messages start in that order on both sides, whichever way they go. So no transport can lock: a rank starts a
message only behind all earlier ones of the pair, its own sends among them come from actions that it has run already,
and nothing that it still has to run is waited for. Receives are started ahead, sends are never waited for until the end
of the step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autopar.errors import RankLostError
from autopar.runtime.collectives.progress import HERE
from autopar.runtime.pipeline.pipeline_routes import SentPiece
from autopar.schedules.actions import PipeAction, Schedule
from autopar.schedules.check import runnable_order


class Message(NamedTuple):
    """A value of one micro-batch on its way from rank group `source` to rank group `target`, where stage `reader`
    reads it in forward or backward."""

    name: str
    micro_batch: int
    reader: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.name} of micro-batch {self.micro_batch}, from rank group {self.source} to {self.target}"


Sends = Mapping[tuple[int, bool], Sequence[tuple[str, int]]]
"""(stage, backward) -> what its pass makes for other stages: (value, reading stage)."""


def message_order(schedule: Schedule, sends: Sends) -> list[Message]:
    """All messages between different rank groups, in the order in which their values are made.

    Values are made where the schedule, with passes of one unit each, ends the pass that makes them.
    """
    timed = []
    for end, rank, action in _played(schedule):
        if action.kind == "W":
            continue
        for name, reader in sends.get((action.stage, action.kind != "F"), ()):
            target = schedule.rank_of(reader, action.micro_batch)
            if target != rank:
                timed.append((end, rank, Message(name, action.micro_batch, reader, rank, target)))
    return [message for _, _, message in sorted(timed, key=lambda item: item[:2])]


def _played(schedule: Schedule) -> list[tuple[int, int, PipeAction]]:
    """(end, rank, action) with passes of equal length."""
    clock = [0] * len(schedule.ranks)
    ends: dict[tuple[int, str, int], int] = {}
    played = []
    for rank, action in runnable_order(schedule):
        needed = schedule.awaited(action)
        ready = 0 if needed is None else ends[(*needed, action.micro_batch)]
        clock[rank] = max(clock[rank], ready) + 1
        if action.kind != "W":
            ends[action.stage, "F" if action.kind == "F" else "gradient", action.micro_batch] = clock[rank]
        played.append((clock[rank], rank, action))
    return played


@dataclass(frozen=True, slots=True)
class Form:
    """Local shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Wires:
    """The messages of one step on one rank. A message is one piece per pair of ranks that share a part of it."""

    def __init__(
        self,
        order: Sequence[Message],
        group: int,
        rank: int,
        pieces: Callable[[Message], Sequence[SentPiece]],
        forms: Mapping[str, Form],
        device: torch.device,
    ) -> None:
        """group: this rank's rank group; pieces: of a message; forms: of what this rank receives."""
        self._group, self._rank, self._pieces, self._forms, self._device = group, rank, pieces, forms, device
        self._waiting: dict[int, deque[tuple[Message, SentPiece]]] = defaultdict(deque)
        for message in order:
            for piece in self._mine(message):
                self._waiting[self._peer(piece)].append((message, piece))
        self._arriving: dict[Message, list[tuple[Any, torch.Tensor, SentPiece]]] = defaultdict(list)
        self._leaving: list[tuple[Message, int, Any, torch.Tensor]] = []

    def send(self, message: Message, value: torch.Tensor) -> None:
        """Start a send; receives of a pair that come before it start first."""
        self._leaving = [leaving for leaving in self._leaving if not leaving[2].is_completed()]
        for piece in self._mine(message):
            self._start_receives(piece.target)
            first = self._waiting[piece.target].popleft()[0]
            assert first == message, f"rank group {self._group} sends {message}, the order says {first}"
            content = piece.of(value)
            with _naming(piece.target, message):
                self._leaving.append((message, piece.target, dist.isend(content, piece.target), content))

    def expect(self, message: Message) -> None:
        """Start receives up to this one, as far as what this rank sends before has been sent."""
        started = {piece.source for _, _, piece in self._arriving.get(message, ())}
        for piece in self._mine(message):
            if piece.source not in started:
                self._start_receives(piece.source, message)

    def receive(self, message: Message) -> torch.Tensor:
        """Wait for a value."""
        self.expect(message)
        arrived = self._arriving.pop(message)
        for work, _, piece in arrived:
            with _naming(piece.source, message):
                work.wait()
        if len(arrived) == 1 and arrived[0][2].is_whole:
            return arrived[0][1]
        form = self._forms[message.name]
        value = torch.empty(form.shape, dtype=form.dtype, device=self._device)
        for _, content, piece in arrived:
            piece.into(value, content)
        return value

    def is_unread(self, message: Message) -> bool:
        """Whether a value for this rank has not been received yet."""
        return message in self._arriving or any(
            waiting == message for queue in self._waiting.values() for waiting, _ in queue
        )

    def finish(self) -> None:
        """Wait until everything has left."""
        for message, target, work, _ in self._leaving:
            with _naming(target, message):
                work.wait()
        assert not self._arriving, "values arrived that nothing read"
        assert not any(self._waiting.values()), "messages were not sent"

    def _mine(self, message: Message) -> list[SentPiece]:
        """The pieces that this rank sends or receives."""
        if self._group not in (message.source, message.target):
            return []
        return [piece for piece in self._pieces(message) if self._rank in (piece.source, piece.target)]

    def _peer(self, piece: SentPiece) -> int:
        return piece.source if piece.target == self._rank else piece.target

    def _start_receives(self, peer: int, last: Message | None = None) -> None:
        waiting = self._waiting[peer]
        while waiting and waiting[0][1].target == self._rank:
            message, piece = waiting.popleft()
            form = self._forms[message.name]
            content = torch.empty(piece.shape, dtype=form.dtype, device=self._device)
            with _naming(peer, message):
                self._arriving[message].append((dist.irecv(content, piece.source), content, piece))
            if message == last:
                return


@contextmanager
def _naming(peer: int, message: Message) -> Iterator[None]:
    """Raise RankLostError for what a transport raises that has lost the rank `peer`."""
    HERE.collective = message
    try:
        yield
    except RuntimeError as error:
        HERE.ask()
        HERE.raise_verdict(error)
        raise RankLostError(
            f"rank {peer} ended or does not answer: {message.name} of micro-batch {message.micro_batch}, read by stage "
            f"{message.reader}, did not go from rank group {message.source} to {message.target}; what stopped rank "
            f"{peer} stands in its own output ({str(error).splitlines()[0]})"
        ) from error
