"""Progress: where this rank is, for the ranks that watch it, and why the job has ended, for itself.

    with HERE.inside("call", number=12): ...        # a phase, which all ranks enter in one order, as their 31st
    HERE.collective = waiting                       # what it waited for last, in that phase
    HERE.place()                                    # Place(phase="call", number=12, entries=31, inside=True, ...)

Another thread reads the place (`guards/heartbeat.py`) and sets the verdict: an error of the whole job. A phase is where
the verdict reaches the program: it is raised where one is entered, and in place of what a transport raises inside.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from autopar.errors import AutoparError, RankLostError
from autopar.ops.dispatch import beyond_memory
from autopar.runtime.collectives.flight_record import RECORD
from autopar.timing import running_phase

ANSWER_SECONDS = 2.0
"""So long an error waits for what the other ranks have found, where their store answers at all."""
_FREQUENT = ("call", "backward")
"""Phases that others are told of with the next beat; of the rest at once."""
_OF_A_TRANSPORT = (
    "closed", "closure", "connection", "reset by peer", "timed out", "timeout", "broken pipe", "gloo", "nccl"
)  # fmt: skip


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank is. phase: the one that it is inside of, or was last; number: of the module's call; entries: phases
    that it has entered; seconds: since it entered or left the last; station: as of `timing.phase`; collective: the last
    in this phase; failed: the entry that an error ended, and its text."""

    phase: str
    number: int
    entries: int
    inside: bool
    seconds: float
    station: str
    collective: str
    failed: tuple[int, str]

    def text(self) -> str:
        """For people: in call 12 for 61 s, at solve, last in all_reduce of body.0 (bwd)."""
        if not self.phase:
            return "nowhere yet"
        of_call = {"call": f"call {self.number}", "backward": f"backward of call {self.number}"}
        where = f"{'in' if self.inside else 'behind'} {of_call.get(self.phase, self.phase)} for {self.seconds:.0f} s"
        station = f", at {self.station}" if self.station else ""
        return f"{where}{station}{f', last in {self.collective}' if self.collective else ''}"


class RankProgress:
    """See the module docstring. Written by the thread that computes, read by others; each write is one assignment."""

    def __init__(self) -> None:
        self.collective: object = ""
        """Its text is asked for by readers only."""
        self._phase, self._number, self._entries, self._depth = "", 0, 0, 0
        self._since = time.monotonic()
        self._failed = (0, "")
        self.begin_watch(False)

    def begin_watch(self, watched: bool) -> None:
        """Forget an earlier verdict; watched: others are told of this place from now on."""
        self.watched = watched
        self.verdict: AutoparError | None = None
        self.news, self.answered, self.delivered = threading.Event(), threading.Event(), threading.Event()

    def place(self) -> Place:
        """Where this rank is now."""
        return Place(
            phase=self._phase,
            number=self._number,
            entries=self._entries,
            inside=self._depth > 0,
            seconds=time.monotonic() - self._since,
            station=running_phase(),
            collective=str(self.collective),
            failed=self._failed,
        )

    @contextmanager
    def inside(self, phase: str, number: int | None = None) -> Iterator[None]:
        """A phase; one inside of another is part of it. number: of the call (None: of the last).

        Raises the verdict where there is one.
        """
        if self._depth == 0:
            self._phase, self.collective, self._since = phase, "", time.monotonic()
            self._number = self._number if number is None else number
            self._entries += 1
        self._depth += 1
        if phase not in _FREQUENT:
            self.news.set()
        try:
            self.raise_verdict()
            yield
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._since = time.monotonic()

    def _fail(self, error: BaseException) -> None:
        """Raise the verdict in place of the transport's error that it is the reason of; others are told at once."""
        if not isinstance(error, RankLostError) and (is_of_transport(error) or is_of_transport(error.__cause__)):
            self.ask()
            self.raise_verdict(error)
            _add_note(error, RECORD.told())
        if isinstance(error, torch.OutOfMemoryError):
            _add_note(error, beyond_memory())
        if isinstance(error, RankLostError):
            self.delivered.set()
        self._failed = (self._entries, f"{type(error).__name__}: {error}"[:1000])
        self.news.set()

    def raise_verdict(self, cause: BaseException | None = None) -> None:
        """Raise it, if there is one."""
        if self.verdict is not None:
            self.delivered.set()
            raise type(self.verdict)(str(self.verdict)) from cause

    def ask(self) -> AutoparError | None:
        """The verdict, after another look at what the other ranks say."""
        if self.watched and self.verdict is None:
            self.answered.clear()
            self.news.set()
            self.answered.wait(ANSWER_SECONDS)
        return self.verdict


def is_of_transport(error: BaseException | None) -> bool:
    """Whether this may be what a rank sees of another one's end."""
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _OF_A_TRANSPORT)


def _add_note(error: BaseException, text: str) -> None:
    """Under the error's text, where Python has notes (3.11)."""
    add: Any = getattr(error, "add_note", None)
    if add is not None and text:
        add(text)


HERE = RankProgress()
"""Of this process. Beside torch's own default process group: a step does not carry what only watchers read."""
