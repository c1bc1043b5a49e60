"""The progress line: what a command does, for how long, and how long it may, on a terminal; plain lines elsewhere.

    | solve: mesh (2, 8): at least 31.2 ms   12 s of at most 60 s
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from autopar.timing import running_phase

FIRST = "loading torch and the model"
MOVES_PER_SECOND = 8
"""How often the line is drawn again: often enough to be seen moving."""


class ProgressLine(logging.Handler):
    """A handler whose latest message stands in one line that moves; warnings go above it, and with `verbose` all."""

    def __init__(self, console: Console, time_limit: float | None, verbose: bool) -> None:
        super().__init__(logging.INFO)
        self._console, self._time_limit, self._verbose = console, time_limit, verbose
        self._began, self._latest = time.monotonic(), FIRST
        self._spinner = Spinner("line")

    def emit(self, record: logging.LogRecord) -> None:
        """Take a message as what is being done."""
        message = record.getMessage()
        if self._verbose or record.levelno >= logging.WARNING:
            self._console.print(message, markup=False, highlight=False)
        if record.levelno < logging.WARNING and not hasattr(record, "phase"):
            self._latest = message.partition("\n")[0]

    def __rich__(self) -> Spinner:
        """The line as it is now."""
        self._spinner.update(text=Text(self.text(), overflow="ellipsis", no_wrap=True))
        return self._spinner

    def text(self) -> str:
        """What is done: the station, the latest message, the seconds so far and the most there may be."""
        spent = f"{time.monotonic() - self._began:.0f} s"
        most = "" if self._time_limit is None else f" of at most {self._time_limit:.0f} s"
        what = ": ".join(part for part in (running_phase(), self._latest) if part)
        return f"{spent}{most}   {what}"


@contextmanager
def progress_line(time_limit: float | None = None, verbose: bool = False) -> Iterator[None]:
    """While it is entered, messages of autopar stand in one moving line where stderr is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    logger, line = logging.getLogger("autopar"), ProgressLine(console, time_limit, verbose)
    before = logger.handlers[:]
    logger.handlers[:] = [line]
    try:
        with Live(line, console=console, refresh_per_second=MOVES_PER_SECOND, transient=True):
            yield
    finally:
        logger.handlers[:] = before
