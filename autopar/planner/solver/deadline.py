"""How long a solve may take: one deadline, made at the entry and handed down; Ctrl-C can bring it forward.

with interruptible(Deadline.after(60.0)) as deadline:
    ...                       # the first Ctrl-C: deadline.left() == 0.0, and the best plan so far is returned
                              # the second: KeyboardInterrupt, as usual
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType


class StopSwitch:
    """Off until it is pressed, once, from a signal handler or another thread."""

    def __init__(self) -> None:
        self.pressed = False

    def press(self) -> None:
        """Ask whoever looks to stop."""
        self.pressed = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A point in time (`time.monotonic`), or None for no limit; `stop` ends the time at once. cpu_at: the same in
    seconds of this process (`time.process_time`), so that what is found does not depend on others who use the machine.
    """

    at: float | None
    stop: StopSwitch = field(default_factory=StopSwitch)
    cpu_at: float | None = None

    @staticmethod
    def after(seconds: float | None, stop: StopSwitch | None = None, cpu_seconds: float | None = None) -> Deadline:
        """Return the deadline `seconds` from now, or after `cpu_seconds` of this process, whichever comes first."""
        return Deadline(
            at=None if seconds is None else time.monotonic() + seconds,
            stop=stop or StopSwitch(),
            cpu_at=None if cpu_seconds is None else time.process_time() + cpu_seconds,
        )

    def left(self) -> float:
        """Return the seconds left, at least 0; infinite without a limit, 0 once the switch is pressed."""
        if self.stop.pressed:
            return 0.0
        wall = math.inf if self.at is None else self.at - time.monotonic()
        cpu = math.inf if self.cpu_at is None else self.cpu_at - time.process_time()
        return max(0.0, min(wall, cpu))


@contextmanager
def interruptible(deadline: Deadline) -> Iterator[Deadline]:
    """Let the first SIGINT press `deadline.stop`; a second one raises KeyboardInterrupt, as without us.

    Only the main thread receives signals, and only a handler that was Python's own is replaced: elsewhere, or
    where the caller has a handler of its own, the deadline is handed on unchanged.
    """
    previous = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or previous is not signal.default_int_handler:
        yield deadline
        return

    def on_first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous)
        deadline.stop.press()

    signal.signal(signal.SIGINT, on_first)
    try:
        yield deadline
    finally:
        signal.signal(signal.SIGINT, previous)
