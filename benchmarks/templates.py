"""Template processes: they import once what workers need, and fork workers of themselves in a moment.

    templates = templates_with(["torch", "tests.distributed.pipeline_jobs"])
    templates.prepare("tests.distributed.pipeline_jobs:train", {"name": "gpt2"})   # what all its ranks need, made once
    worker = templates.fork(serve, rank=3, connection=theirs)                     # runs serve(theirs)

There are two, with a hash seed of their own each, and neighbouring ranks come from different ones: what ranks must say
alike, such as the order of collectives, cannot follow from a hash unnoticed. A template has no thread, so that forks
are sound.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import select
import signal
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

COUNT = 2

Serve: TypeAlias = Callable[[Connection], None]


class ForkedWorker:
    """A process that a template forked, held by a descriptor: the kernel takes it away when it ends, and its number may
    be another's by then."""

    def __init__(self, pid: int) -> None:
        try:
            self._process: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._process = None
        weakref.finalize(self, _close, self._process)

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def join(self) -> None:
        """Wait for its end."""
        if self._process is not None:
            select.select([self._process], [], [])


def _close(process: int | None) -> None:
    if process is not None:
        os.close(process)


class Templates:
    """`COUNT` processes that have imported `preload`."""

    def __init__(self, preload: Sequence[str]) -> None:
        self.modules = frozenset(preload)
        self.generation = 0
        """Grows when something was made that workers forked before do not have."""
        context = multiprocessing.get_context("spawn")
        self._connections = []
        for _ in range(COUNT):
            mine, theirs = context.Pipe()
            context.Process(target=_obey, args=(theirs, tuple(preload)), daemon=True).start()
            theirs.close()
            self._connections.append(mine)

    def prepare(self, target: str, arguments: Mapping[str, Any]) -> None:
        """Let every template do what the job `target` wants done before its workers are forked: its attribute
        `prepare`, called with the arguments of the job, says whether it made anything new.

        Raises AssertionError with the traceback of a template.
        """
        for connection in self._connections:
            connection.send((target, arguments))
        answers = [connection.recv() for connection in self._connections]
        for _, failure in answers:
            assert not failure, f"{target} could not be prepared\n{failure}"
        self.generation += any(made for made, _ in answers)

    def fork(self, serve: Serve, rank: int, connection: Connection) -> ForkedWorker:
        """A worker for this rank that runs `serve`, a function of a module, on `connection`."""
        template = self._connections[rank % COUNT]
        template.send(serve)
        reduction.send_handle(template, connection.fileno(), os.getpid())
        return ForkedWorker(template.recv())


_RUNNING: list[Templates] = []
"""Of this process, until it ends."""


def templates_with(preload: Sequence[str]) -> Templates:
    """Templates that have imported these modules, and perhaps more: those of an earlier call where there are any."""
    for known in _RUNNING:
        if known.modules >= frozenset(preload):
            return known
    _RUNNING.append(Templates(preload))
    return _RUNNING[-1]


def _obey(connection: Connection, preload: Sequence[str]) -> None:
    """Loop of a template: prepare jobs and fork workers until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    for module in preload:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    while True:
        try:
            wanted = connection.recv()
        except EOFError:
            return
        if isinstance(wanted, tuple):
            connection.send(_prepared(*wanted))
            continue
        handle = reduction.recv_handle(connection)
        gc.freeze()  # a collection in a worker would copy all pages
        pid = os.fork()
        if pid == 0:
            connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _serve_and_end(wanted, handle)
        os.close(handle)
        connection.send(pid)


def _prepared(target: str, arguments: Mapping[str, Any]) -> tuple[bool, str]:
    module, _, name = target.partition(":")
    try:
        prepare = getattr(getattr(importlib.import_module(module), name), "prepare", None)
        return prepare is not None and bool(prepare(**arguments)), ""
    except Exception:
        return False, traceback.format_exc()


def _serve_and_end(serve: Serve, handle: int) -> None:
    try:
        serve(Connection(handle))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
