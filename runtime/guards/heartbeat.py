"""Heartbeat: every rank says where it is, and a job of which a rank says nothing any more ends, with that rank's name.

    RankLostError: rank 1 is silent for 60 s (process 4711 on node-3): it was in backward of call 12 for 2 s, last in
    all_reduce of body.0 (bwd); rank 0 is in backward of call 12 for 63 s, ...

A thread writes this rank's beat to a connection of its own to the job's store, and reads that of the next rank
(`beats.py` judges). It is not the thread that computes, so silence means a dead or stopped process, or one that no
network reaches. A second thread looks whether the store itself answers: it lies in the process of rank 0, or of the
torchrun that started it.

A verdict is written to the store, so that all ranks say the same. The one that waits inside of a gloo collective is
woken by closing its connections, and raises; where that does not help within `GRACE_SECONDS` (a wait for a GPU, code of
the user), the process says the message and ends with `EXIT_CODE`, as NCCL's own watchdog would.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from autopar._compat import Store, all_groups, store_connection
from autopar.errors import AutoparError, ConfigurationError, RankLostError, RankMismatchError
from autopar.runtime.collectives.flight_record import RECORD
from autopar.runtime.collectives.progress import HERE
from autopar.runtime.consensus import from_first_rank
from autopar.runtime.guards.beats import Beat, Heard, Verdict, judge, late, late_message, watched
from autopar.runtime.process_groups import rank, world_size

log = logging.getLogger(__name__)

VARIABLE = "AUTOPAR_HEARTBEAT"
DEFAULT_SECONDS = 60.0
BEATS_PER_LIMIT = 12
GRACE_SECONDS = 5.0
"""So long the computing thread has to raise the verdict before the process ends."""
EXIT_CODE = 5
LINGER_SECONDS = 1.0
"""So long rank 0, whose process may hold the store, lets the others leave at its end: they talk to the store."""
KEY, VERDICT_KEY, LEFT_KEY = "autopar/beat/", "autopar/verdict", "autopar/left"
UNUSED_TAG = 7
"""Of messages that nobody sends."""


def heartbeat_seconds() -> float:
    """The silence after which a job ends, as $AUTOPAR_HEARTBEAT says; 0: never. Raises ConfigurationError."""
    given = os.environ.get(VARIABLE, "")
    try:
        seconds = float(given) if given else DEFAULT_SECONDS
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds < math.inf:
        raise ConfigurationError(f"{VARIABLE}={given!r}: write the seconds of silence that end a job, 0 for never")
    return seconds


class Heartbeat:
    """The beats of this rank in one process group, and its ear for the others."""

    def __init__(self, store: Store, rank: int, world: int, limit: float) -> None:
        """store: a connection that nobody else uses. limit: seconds of silence."""
        self._store, self._rank, self._world, self._limit = store, rank, world, limit
        self._period = limit / BEATS_PER_LIMIT
        self._host, self._process = socket.gethostname(), os.getpid()
        self._count = 0
        self._heard: dict[int, Heard] = {}
        self._group = weakref.ref(dist.group.WORLD) if dist.is_initialized() else None
        self._stopped, self._given_up = threading.Event(), threading.Lock()
        self._asking, self._process_ends = False, False
        self._rounds = 0
        self._next_warning = 1.0
        self._warned_entry = 0
        self._threads = [
            threading.Thread(target=target, name=f"autopar-{name}", daemon=True)
            for name, target in (("heartbeat", self._beat), ("store-watch", self._watch_store))
        ]

    def start(self) -> None:
        """Begin to beat."""
        for thread in self._threads:
            thread.start()

    def stop(self, process_ends: bool = False) -> None:
        """Say that this rank leaves in order, and end, after two seconds also where the store does not answer."""
        self._process_ends = process_ends
        self._stopped.set()
        HERE.news.set()
        for thread in self._threads:
            thread.join(2.0)

    @property
    def is_over(self) -> bool:
        """Whether its process group is gone or another one, or it was stopped."""
        return self._stopped.is_set() or (self._group is not None and self._group() is not dist.group.WORLD)

    # the thread that talks to the store

    def _beat(self) -> None:
        before = time.monotonic()
        try:
            while not self.is_over and HERE.verdict is None:
                now = time.monotonic()
                elapsed, before = min(now - before, 2 * self._period), now  # this process may have stood still itself
                HERE.news.clear()
                self._round(elapsed)
                if not HERE.news.is_set():
                    HERE.answered.set()
                HERE.news.wait(self._period)
            if HERE.verdict is None:
                self._leave()
        except (RuntimeError, OSError) as error:
            log.info(f"the heartbeat ends with the job's store: {str(error).splitlines()[0]}")
        finally:
            self._stopped.set()
            HERE.watched = False
            HERE.answered.set()

    def _round(self, elapsed: float) -> None:
        self._asking = True
        self._say()
        others = watched(self._rank, self._world, self._heard, self._limit)
        beats = {other: self._ask(other) for other in others}
        told = self._store.check([VERDICT_KEY])
        verdict = msgspec.json.decode(self._store.get(VERDICT_KEY), type=Verdict) if told else None
        self._asking = False
        self._rounds += 1
        mine = HERE.place()
        self._heard = {other: self._heard.get(other, Heard()) for other in others}
        for other, heard in self._heard.items():
            heard.hear(beats[other], elapsed)
            heard.compare(mine, elapsed)
        verdict = verdict or judge(self._rank, mine, self._heard, self._limit)
        if verdict is not None:
            self._give_up(verdict, publish=not told)
        self._warn(mine.seconds)

    def _say(self, ended: bool = False) -> None:
        self._count += 1
        beat = Beat(count=self._count, place=HERE.place(), host=self._host, process=self._process, ended=ended)
        self._store.set(f"{KEY}{self._rank}", msgspec.json.encode(beat).decode())

    def _leave(self) -> None:
        self._say(ended=True)
        left = self._store.add(LEFT_KEY, 1)
        until = time.monotonic() + (LINGER_SECONDS if self._rank == 0 and self._process_ends else 0.0)
        while left < self._world and time.monotonic() < until:
            time.sleep(0.02)
            left = self._store.add(LEFT_KEY, 0)

    def _ask(self, other: int) -> Beat | None:
        key = f"{KEY}{other}"
        return msgspec.json.decode(self._store.get(key), type=Beat) if self._store.check([key]) else None

    def _warn(self, seconds: float) -> None:
        """Say that a phase is long; at twice the time again."""
        mine = HERE.place()
        if mine.entries != self._warned_entry:
            self._warned_entry, self._next_warning = mine.entries, 1.0
        if seconds > late(mine, self._limit) * self._next_warning:
            self._next_warning *= 2.0
            late_text = late_message(mine, self._heard, list(self._heard))
            log.warning("; ".join(filter(None, (late_text, RECORD.told()))))

    # the thread that watches the store

    def _watch_store(self) -> None:
        waited, rounds, before = 0.0, 0, time.monotonic()
        while not self._stopped.wait(self._period):
            now = time.monotonic()
            elapsed, before = min(now - before, 2 * self._period), now
            waited = waited + elapsed if self._asking and self._rounds == rounds else 0.0
            rounds = self._rounds
            if waited > self._limit:
                self._give_up(
                    Verdict(
                        lost=True,
                        message=f"the job's store does not answer for {waited:.0f} s: rank 0, or the torchrun that "
                        f"started it, is stopped or out of reach; rank {self._rank} is {HERE.place().text()}",
                    ),
                    publish=False,
                )
                return

    # the end

    def _give_up(self, verdict: Verdict, publish: bool) -> None:
        if not self._given_up.acquire(blocking=False):
            return
        if publish:
            self._store.set(VERDICT_KEY, msgspec.json.encode(verdict).decode())
        said = "; ".join(filter(None, (verdict.message, RECORD.told())))
        error: AutoparError = (RankLostError if verdict.lost else RankMismatchError)(said)
        HERE.verdict = error
        HERE.answered.set()
        log.error(f"the job ends: {said}")
        if not HERE.delivered.is_set():
            wake_from_gloo()
        if not HERE.delivered.wait(GRACE_SECONDS) and not self.is_over:
            sys.stderr.write(f"{type(error).__name__}: {said}\n")
            sys.stderr.flush()
            os._exit(EXIT_CODE)


def wake_from_gloo() -> None:
    """Let every wait of this process inside of a gloo group raise: where one message of a group is late, gloo closes
    all of its connections, and a message that nobody sends is late after a millisecond."""
    for group in all_groups():
        others = ((group.rank() + step) % group.size() for step in range(1, group.size()))
        if not any(_is_late(group, other) for other in others):
            log.debug(f"no connection of group {group.group_name} is left to close")


def _is_late(group: dist.ProcessGroup, other: int) -> bool:
    """Whether the message was late; else the connection to this one was closed already, or the group is not gloo's."""
    try:
        group.recv([torch.zeros(1)], other, UNUSED_TAG).wait(timedelta(milliseconds=1))
    except (RuntimeError, ValueError) as error:
        return "timed out" in str(error).lower()
    return False


_beating: list[Heartbeat] = []
"""That of this process, if there is one."""


def start_heartbeat() -> None:
    """Beat in the running process group from now on, until it is destroyed or the process ends; all ranks call it.

    Nothing where this process is alone or already beats, or where rank 0 says so. Raises ConfigurationError."""
    if world_size() == 1 or (_beating and not _beating[0].is_over):
        return
    stop_heartbeat()
    limit, name = from_first_rank(lambda: (heartbeat_seconds(), secrets.token_hex(4)), "the seconds of a heartbeat")
    if limit == 0.0:
        return
    HERE.begin_watch(True)
    _beating.append(Heartbeat(store_connection(name), rank(), world_size(), limit))
    _beating[0].start()
    atexit.register(_at_exit)


def stop_heartbeat() -> None:
    """Leave the others in order."""
    atexit.unregister(_at_exit)
    while _beating:
        _beating.pop().stop()
    HERE.begin_watch(False)


def _at_exit() -> None:
    while _beating:
        _beating.pop().stop(process_ends=True)


def _forget() -> None:
    _beating.clear()  # a forked child has no threads
    HERE.begin_watch(False)


os.register_at_fork(after_in_child=_forget)
