"""Rounds of collectives that are on their way at the same time: none waits for the end of the one before it."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeAlias, cast

import pytest
import torch

from autopar.runtime.collectives.communicator import Communicator
from autopar.runtime.collectives.exchanged import Collective
from autopar.runtime.collectives.host_collectives import Started

SECONDS = 20.0
"""Longer than any of these takes; what hangs ends by then."""


class OneRank(Communicator):
    """Without a process group: its threads, and what errors name."""

    def __init__(self) -> None:
        self.size, self.place, self.ranks = 1, 0, (0,)
        self.timeout = timedelta(seconds=SECONDS)
        self.waited_seconds = 0.0
        self._queues = {}


class Event:
    """Stands for an exchange that ends when it is told to."""

    def __init__(self, ends: bool = True) -> None:
        self.ended, self.awaited = threading.Event(), threading.Event()
        if ends:
            self.ended.set()

    def wait(self, timeout: timedelta) -> None:
        self.awaited.set()
        if not self.ended.wait(timeout.total_seconds()):
            raise TimeoutError("the exchange did not end")


Rounds: TypeAlias = Generator[Event, None, torch.Tensor]


def started(communicator: Communicator, collective: Rounds) -> Started:
    return Started("all_reduce", communicator, "head/mm#0/bwd", cast(Collective, collective), 4).go_on()


def test_a_collective_goes_on_while_the_one_before_it_waits() -> None:
    """The second round of the first ends only when the second collective has begun its own."""
    communicator, late = OneRank(), Event(ends=False)

    def first() -> Rounds:
        yield Event()
        yield late
        return torch.tensor(1.0)

    def second() -> Rounds:
        yield Event()
        late.ended.set()
        yield Event()
        return torch.tensor(2.0)

    one = started(communicator, first())
    assert late.awaited.wait(SECONDS)
    two = started(communicator, second())
    assert [float(each.wait()) for each in (one, two)] == [1.0, 2.0]


def test_rounds_of_one_number_run_in_the_order_of_the_collectives() -> None:
    communicator, seen = OneRank(), list[tuple[int, int]]()

    def collective(name: int) -> Rounds:
        for number in range(3):
            yield Event()
            seen.append((number, name))
        return torch.tensor(float(name))

    for each in [started(communicator, collective(name)) for name in range(8)]:
        each.wait()
    for number in range(3):
        assert [name for which, name in seen if which == number] == list(range(8))


@pytest.mark.parametrize("failing", [0, 1])
def test_what_fails_in_a_round_is_raised_by_the_one_who_waits_and_the_next_collective_goes_on(failing: int) -> None:
    communicator = OneRank()

    def broken() -> Rounds:
        for number in range(3):
            yield Event()
            if number == failing:
                raise ValueError("a sum of strings")
        return torch.tensor(0.0)

    def sound() -> Rounds:
        yield Event()
        yield Event()
        return torch.tensor(2.0)

    one, two = started(communicator, broken()), started(communicator, sound())
    with pytest.raises(ValueError, match="a sum of strings"):
        one.wait()
    assert float(two.wait()) == 2.0


def test_threads_end_with_the_communicator() -> None:
    communicator = OneRank()
    done: Future[threading.Thread] = Future()
    communicator.later(0, lambda: done.set_result(threading.current_thread()))
    thread = done.result(SECONDS)
    del communicator
    thread.join(SECONDS)
    assert not thread.is_alive()
