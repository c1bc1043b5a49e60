"""One pool of worker processes for all distributed tests of a session.

    pool.run("tests.distributed.cases:all_reduce_of_ranks", world_size=2, values=[1, 2])   # -> result of each rank

Workers stay alive; every job makes a fresh gloo group of its world size among the first workers, by a file store. A
job that fails raises with the worker's traceback. A job that is late kills the pool and names the late ranks; the
next job starts new workers.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

WORKERS = 4


class WorkerError(AssertionError):
    """A job failed on some rank; the message holds its traceback."""


class Pool:
    """`size` processes that run named functions together; see the module docstring."""

    def __init__(self, size: int = WORKERS) -> None:
        self._size = size
        self._workers: list[tuple[SpawnProcess, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="autopar-pool-")
        self._jobs = itertools.count()

    def run(self, target: str, *, world_size: int = WORKERS, timeout: float = 120.0, **arguments: Any) -> list[Any]:
        """Call `module:function` with `arguments` on `world_size` ranks; the results in rank order.

        Raises WorkerError where a rank raised (its traceback) or did not answer within `timeout` seconds.
        """
        self._start()
        store = str(Path(self._folder.name) / f"job-{next(self._jobs)}")
        workers = self._workers[:world_size]
        for rank, (_, connection) in enumerate(workers):
            connection.send((target, arguments, rank, world_size, store))
        answers = self._collect([connection for _, connection in workers], timeout)
        late = [rank for rank in range(world_size) if rank not in answers]
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
        if late:
            self.close()
            failures.append(f"ranks {late} did not answer within {timeout:g} s; the pool was killed")
        if failures:
            raise WorkerError(f"{target} failed\n" + "\n".join(failures))
        return [answers[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        """Kill all workers; the next `run` starts new ones."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        while len(self._workers) < self._size:
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, mine))

    def _collect(self, connections: Sequence[Connection], timeout: float) -> dict[int, tuple[bool, Any]]:
        """Answers by rank. Once a rank failed, the others get a few seconds more: they may wait for it forever."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(connections):
            pending = {connection: rank for rank, connection in enumerate(connections) if rank not in answers}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                answer = _received(connection)
                answers[pending[connection]] = answer
                if not answer[0]:
                    deadline = min(deadline, time.monotonic() + 5.0)
        return answers


def _received(connection: Any) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = connection.recv()
    except (EOFError, ConnectionError):
        return False, "the worker process died"
    return answer


def _serve(connection: Connection) -> None:
    """Loop of one worker: run jobs until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            connection.send(_outcome(*connection.recv()))


def _outcome(target: str, arguments: dict[str, Any], rank: int, world_size: int, store: str) -> tuple[bool, Any]:
    import torch.distributed as dist

    module, _, name = target.partition(":")
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        return True, getattr(importlib.import_module(module), name)(**arguments)
    except Exception:
        return False, traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
