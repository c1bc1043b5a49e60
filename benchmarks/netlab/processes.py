"""The processes of one command: one session per rank, waited for and ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

GRACE_SECONDS = 5.0
"""How long ranks may go on once one has failed, and to end when they are asked to."""
SHOWN_LINES = 30


class Process(Protocol):
    """A `subprocess.Popen` or a `forks.Fork` that leads a session of its own."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


def wait_for(ranks: Sequence[Process], deadline: float) -> list[int]:
    """Until all have ended, or `GRACE_SECONDS` after one has failed; the ranks that ran into the deadline itself."""
    patience = deadline
    while running := [rank for rank, process in enumerate(ranks) if process.poll() is None]:
        if any(process.returncode for process in ranks):
            patience = min(patience, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > patience:
            return running if patience == deadline else []
        time.sleep(0.02)
    return []


def end_sessions(ranks: Sequence[Process]) -> None:
    """Ask every rank's session to end, then end it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in ranks:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in ranks):
            time.sleep(0.02)
    for process in ranks:
        process.wait()


def last_lines(ranks: Sequence[int], logs: Sequence[Path]) -> str:
    """The last lines of what failing ranks wrote."""
    parts = []
    for rank in ranks:
        if logs[rank].exists():
            lines = logs[rank].read_text(errors="replace").splitlines()[-SHOWN_LINES:]
            parts.append("\n".join([f"--- rank {rank}:", *lines]))
    return "\n".join(parts)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as an interrupt does, so that everything is taken down."""

    def interrupt(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
