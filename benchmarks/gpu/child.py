"""Rows of a function that runs in a forked process, under a time limit, whatever becomes of that process.

    found = in_child(lambda: stage.rows(place), seconds=90)
    found.rows, found.ending, found.lines       # what it yielded, how it ended, the last lines that it printed

The process that forks must not have touched CUDA: a context does not outlive a fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.stage import Row

LAST_LINES = 120
"""A crash of native code prints the stacks of all threads, the cause first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """rows: what was yielded; ending: "" where the function returned, else how its process ended; lines: the last that
    it printed; seconds: how long it ran."""

    rows: list[Row]
    ending: str
    lines: list[str]
    seconds: float


def in_child(make_rows: Callable[[], Iterator[Row]], *, seconds: float) -> Found:
    """Run the function in a child and end it, with all that it started, when its time is over."""
    cuda: Any = torch.cuda
    assert not cuda.is_initialized(), "CUDA was touched before the fork"
    with tempfile.TemporaryDirectory(prefix="autopar-stage-") as folder:
        rows, log = Path(folder) / "rows", Path(folder) / "log"
        began = time.monotonic()
        child = multiprocessing.get_context("fork").Process(target=_serve, args=(make_rows, rows, log))
        child.start()
        child.join(seconds)
        is_late = child.is_alive()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
        return Found(
            rows=[json.loads(line) for line in _lines(rows)],
            ending=f"ended after {seconds:g} s" if is_late else _ending(child.exitcode or 0),
            lines=_lines(log)[-LAST_LINES:],
            seconds=time.monotonic() - began,
        )


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}" if exit_code else ""


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _serve(make_rows: Callable[[], Iterator[Row]], rows: Path, log: Path) -> None:
    """In the child: a group of its own, its output into a file, a line for every row."""
    os.setpgid(0, 0)
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.enable()
    with rows.open("w", buffering=1) as file:
        for row in make_rows():
            file.write(json.dumps(row) + "\n")
