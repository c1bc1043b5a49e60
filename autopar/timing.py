"""Phases: every station of the journey says how long it took, in one line, and measuring programs can listen.

    with phase("capture"):                      # or as a decorator: @phase("solve")
        ...                                     # logs "capture 1.20 s (1.18 CPU s)" to the logger autopar.timing

    with PhaseTimes() as times: plan(...)       # times.phases == {"capture": PhaseTime(...), "solve": ...}

CPU seconds are those of this process and of its children that have ended. Phases do not nest. `running_phase()` is the
one that runs now.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds on the clock and of CPU time."""

    seconds: float
    cpu_seconds: float


_running: list[str] = []
"""Of this process: what another thread tells of it."""


def running_phase() -> str:
    """The station that this process is at, "" where it is at none."""
    return _running[-1] if _running else ""


def cpu_seconds() -> float:
    """CPU time of this process and its ended children, user and system."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@contextmanager
def phase(name: str, level: int = logging.DEBUG) -> Iterator[None]:
    """Time a station; logs it at `level` when it ends, also by an error."""
    started, started_cpu = time.perf_counter(), cpu_seconds()
    _running.append(name)
    try:
        yield
    finally:
        _running.remove(name)
        spent = PhaseTime(time.perf_counter() - started, cpu_seconds() - started_cpu)
        message = "%s %.2f s (%.2f CPU s)"
        logger.log(level, message, name, spent.seconds, spent.cpu_seconds, extra={"phase": name, "spent": spent})


class PhaseTimes(logging.Handler):
    """Adds up the phases that end while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.phases: dict[str, PhaseTime] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Add the time of a finished phase; other records say nothing."""
        name, spent = getattr(record, "phase", None), getattr(record, "spent", None)
        if isinstance(name, str) and isinstance(spent, PhaseTime):
            before = self.phases.get(name, PhaseTime(0.0, 0.0))
            total = PhaseTime(before.seconds + spent.seconds, before.cpu_seconds + spent.cpu_seconds)
            self.phases[name] = total

    def __enter__(self) -> PhaseTimes:
        self._level = logger.level
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logger.removeHandler(self)
        logger.setLevel(self._level)
