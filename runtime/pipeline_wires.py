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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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
    """The messages of one step on one rank."""

    def __init__(
        self,
        order: Sequence[Message],
        group: int,
        ranks: Sequence[int],
        forms: Mapping[str, Form],
        device: torch.device,
    ) -> None:
        """group: this rank's rank group; ranks: the process that stands at this rank's place in every rank group."""
        self._group, self._ranks, self._forms, self._device = group, ranks, forms, device
        self._waiting: dict[int, deque[Message]] = defaultdict(deque)
        for message in order:
            if group in (message.source, message.target):
                self._waiting[self._peer(message)].append(message)
        self._arriving: dict[Message, tuple[Any, torch.Tensor]] = {}
        self._leaving: list[tuple[Any, torch.Tensor]] = []

    def send(self, message: Message, value: torch.Tensor) -> None:
        """Start a send; receives of the pair that come before it start first."""
        self._start_receives(self._peer(message))
        first = self._waiting[self._peer(message)].popleft()
        assert first == message, f"rank group {self._group} sends {message}, the order says {first}"
        value = value.contiguous()
        self._leaving = [(work, kept) for work, kept in self._leaving if not work.is_completed()]
        self._leaving.append((dist.isend(value, self._ranks[message.target]), value))

    def expect(self, message: Message) -> None:
        """Start receives up to this one, as far as what this rank sends before has been sent."""
        if message not in self._arriving:
            self._start_receives(self._peer(message), message)

    def receive(self, message: Message) -> torch.Tensor:
        """Wait for a value."""
        self.expect(message)
        work, value = self._arriving.pop(message)
        work.wait()
        return value

    def finish(self) -> None:
        """Wait until everything has left."""
        for work, _ in self._leaving:
            work.wait()
        assert not self._arriving, "values arrived that nothing read"
        assert not any(self._waiting.values()), "messages were not sent"

    def _peer(self, message: Message) -> int:
        return message.source if message.target == self._group else message.target

    def _start_receives(self, peer: int, last: Message | None = None) -> None:
        waiting = self._waiting[peer]
        while waiting and waiting[0].target == self._group:
            message = waiting.popleft()
            form = self._forms[message.name]
            value = torch.empty(form.shape, dtype=form.dtype, device=self._device)
            self._arriving[message] = (dist.irecv(value, self._ranks[message.source]), value)
            if message == last:
                return
