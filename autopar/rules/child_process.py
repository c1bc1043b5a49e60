"""Run trials that may crash in forked child processes.

    run_in_child(trial, 3)   ->   ([trial(0), None, trial(2)], 1)      trial(1) killed its process

A child takes the trials in order and sends each result back; where it dies, the trial counts as crashed and a new child
goes on behind it. Results are plain data (JSON).
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import time
from collections.abc import Callable
from typing import Any

import torch

from autopar.errors import ConfigurationError

TRIAL_SECONDS = 30.0
"""Of one trial: it hangs if it takes longer, and is killed."""
TOTAL_SECONDS = 120.0
"""Of all trials of one question together."""


def run_in_child(trial: Callable[[int], Any], count: int, *, until: Any = None) -> tuple[list[Any], int]:
    """(results of `trial(0)` ... `trial(count - 1)`, number of crashes). A trial that crashes, or takes longer than
    `TRIAL_SECONDS` and is killed, gives None. until: the result behind which no more trials are made. Raises
    ConfigurationError where the system cannot fork, and where the trials take longer than `TOTAL_SECONDS`."""
    if not hasattr(os, "fork"):
        raise ConfigurationError("trials need a system that can fork; write the rule by hand and register it")
    results: list[Any] = []
    crashes = 0
    end = time.monotonic() + TOTAL_SECONDS
    while len(results) < count:
        if time.monotonic() > end:
            raise ConfigurationError(
                f"only {len(results)} of {count} trials ended in {TOTAL_SECONDS:.0f} s, {crashes} of them crashed or "
                f"took longer than {TRIAL_SECONDS:.0f} s; write the rule by hand and register it"
            )
        before = len(results)
        results += _run_until_crash(trial, before, count, until, end)
        if until is not None and results and results[-1] == until:
            break
        if len(results) < count and time.monotonic() <= end:
            results.append(None)
            crashes += 1
    return results, crashes


def _run_until_crash(trial: Callable[[int], Any], first: int, count: int, until: Any, end: float) -> list[Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _work(trial, first, count, until, writer)
    os.close(writer)
    try:
        lines = _lines(reader, end)
    finally:
        os.close(reader)
        _end(child)
    results = [json.loads(line) for line in lines]
    return [tuple(result) if isinstance(result, list) else result for result in results]


def _lines(reader: int, end: float) -> list[bytes]:
    """Whole lines until the pipe is closed or silent for too long, or it is later than `end`."""
    received = b""
    while select.select([reader], [], [], max(0.0, min(TRIAL_SECONDS, end - time.monotonic())))[0]:
        piece = os.read(reader, 1 << 16)
        if not piece:
            break
        received += piece
    return received.split(b"\n")[:-1]


def _work(trial: Callable[[int], Any], first: int, count: int, until: Any, writer: int) -> None:
    """Body of the child: never returns, runs no exit handlers of the parent."""
    status = 1
    try:
        faulthandler.disable()  # a crash is a result here, not news,
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # also where the allocator of C finds it
        torch.set_num_threads(1)  # the threads of the parent do not exist here
        with os.fdopen(writer, "w", buffering=1) as out:
            for index in range(first, count):
                result = trial(index)
                out.write(json.dumps(result) + "\n")
                if until is not None and result == until:
                    break
        status = 0
    finally:
        os._exit(status)


def _end(child: int) -> None:
    """Stop the child if it still works, and collect it."""
    finished, _ = os.waitpid(child, os.WNOHANG)
    if finished == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
