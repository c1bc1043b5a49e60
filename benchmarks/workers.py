"""Worker processes that stay alive between jobs, for tests and benchmarks that run on several ranks.

    pool.run("tests.distributed.cases:all_reduce_of_ranks", world_size=2, values=[1, 2])   # -> result of each rank

Every job makes a fresh gloo group of its world size among the first workers, by a file store. A job that fails raises
with the worker's traceback. A job that is late kills the pool and names the late ranks; the next job starts new
workers. With `preload`, workers are forked from processes that have imported these modules (`templates.py`), so a
restart is cheap, and what a job says to `prepare` is done once for all ranks:

    train.prepare = capture            # before the ranks run train(**arguments), a template runs capture(**arguments)
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.templates import ForkedWorker, templates_with

WORKERS = 4
GRACE_SECONDS = 3.0
"""Once a rank failed, the others may wait for it forever: they get this much longer."""

DIED = "the worker process died"


class WorkerError(AssertionError):
    """A job failed on some rank; the message holds its traceback. `late`: some rank did not answer in time."""

    def __init__(self, message: str, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class Pool:
    """`size` processes that run named functions together; see the module docstring."""

    def __init__(self, size: int = WORKERS, preload: Sequence[str] = ()) -> None:
        self._size = size
        self._templates = templates_with(preload) if preload else None
        self._generation = 0
        self._workers: list[tuple[BaseProcess | ForkedWorker, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="autopar-pool-")
        self._jobs = itertools.count()

    def run(
        self,
        target: str,
        *,
        world_size: int = WORKERS,
        timeout: float = 120.0,
        on_report: Callable[[Any], None] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Call `module:function` with `arguments` on `world_size` ranks; the results in rank order.

        With `on_report` the function also takes a keyword `report`; what it is called with arrives at `on_report`.
        Raises WorkerError where a rank raised (its traceback) or did not answer within `timeout` seconds.
        """
        if self._templates is not None:
            self._templates.prepare(target, arguments)
            if self._generation != self._templates.generation:
                self.close()  # these workers do not have what was prepared
            self._generation = self._templates.generation
        self._start()
        store = str(Path(self._folder.name) / f"job-{next(self._jobs)}")
        workers = self._workers[:world_size]
        for rank, (_, connection) in enumerate(workers):
            connection.send((target, arguments, rank, world_size, store, on_report is not None))
        answers = self._collect([connection for _, connection in workers], timeout, on_report)
        late = [rank for rank in range(world_size) if rank not in answers]
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
        if late or any(text == DIED for ok, text in answers.values() if not ok):
            self.close()
        timed_out = bool(late) and not failures
        if late:
            failures.append(f"ranks {late} did not answer within {timeout:g} s; the pool was killed")
        if failures:
            raise WorkerError(f"{target} failed\n" + "\n".join(failures), timed_out)
        return [answers[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        """Kill all workers; the next `run` starts new ones."""
        for worker, connection in self._workers:
            worker.kill()
            worker.join()
            connection.close()
        self._workers = []

    def _start(self) -> None:
        while len(self._workers) < self._size:
            mine, theirs = multiprocessing.Pipe()
            self._workers.append((self._started(len(self._workers), theirs), mine))
            theirs.close()

    def _started(self, rank: int, connection: Connection) -> BaseProcess | ForkedWorker:
        if self._templates is not None:
            return self._templates.fork(_serve, rank, connection)
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(connection,), daemon=True)
        process.start()
        return process

    def _collect(
        self, connections: Sequence[Connection], timeout: float, on_report: Callable[[Any], None] | None
    ) -> dict[int, tuple[bool, Any]]:
        """Answers by rank, until `timeout` or GRACE_SECONDS after the first failure."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(connections):
            pending = {connection: rank for rank, connection in enumerate(connections) if rank not in answers}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                kind, content = _received(connection)
                if kind == "report":
                    assert on_report is not None
                    on_report(content)
                    continue
                answers[pending[connection]] = (kind == "result", content)
                if kind == "error":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers


def _received(connection: Any) -> tuple[str, Any]:
    try:
        kind, content = connection.recv()
    except (EOFError, ConnectionError):
        return "error", DIED
    return kind, content


def _serve(connection: Connection) -> None:
    """Loop of one worker: run jobs until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with contextlib.suppress(EOFError):
        while True:
            target, arguments, rank, world_size, store, reports = connection.recv()
            if reports:
                arguments["report"] = lambda content: connection.send(("report", content))
            connection.send(_outcome(target, arguments, rank, world_size, store))


def _outcome(target: str, arguments: dict[str, Any], rank: int, world_size: int, store: str) -> tuple[str, Any]:
    import torch.distributed as dist

    from autopar._compat import forget_device_meshes

    module, _, name = target.partition(":")
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        dist.barrier()  # a rank that is done at once would close connections that others are still making
        return "result", getattr(importlib.import_module(module), name)(**arguments)
    except Exception:
        return "error", traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_device_meshes()
