"""Local gloo processes: start N of them, run one function in each, hand back what they return.

    def job(report, width):                  # a module-level function: it is sent to the processes by name
        report("half way")                   # rank 0's reports arrive at `on_report`
        return torch.distributed.get_rank() * width

    run_processes(job, 4, 10)                # [0, 10, 20, 30]

Each process has one thread, meets the others in a file (no port is opened for rendezvous) and ends with its function.
When one fails, the others are ended: an AutoparError is raised here again, any other error is printed by its process.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed

from autopar.errors import AutoparError

Report: TypeAlias = Callable[[Any], None]


def run_processes(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    on_report: Report | None = None,
    timeout_seconds: float = 600.0,
) -> list[Any]:
    """`function(report, *arguments)` on every rank of a gloo process group; returns the results in rank order.

    Raises the AutoparError that a process raised, or AutoparError that names the process which failed otherwise, or
    when `timeout_seconds` pass.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        store = str(Path(folder) / "store")
        processes: list[SpawnProcess] = []
        connections: list[Connection] = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(sender, rank, world_size, store, function, arguments), daemon=True
            )
            process.start()
            sender.close()
            processes.append(process)
            connections.append(receiver)
        try:
            return _collect(connections, on_report, time.monotonic() + timeout_seconds)
        finally:
            _end(processes)


def _collect(connections: Sequence[Connection], on_report: Report | None, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    open_ranks = {connection: rank for rank, connection in enumerate(connections)}
    while len(results) < len(connections):
        ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(set(range(len(connections))) - set(results))
            raise AutoparError(f"ranks {missing} did not finish in time")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = open_ranks[connection]
            try:
                kind, content = connection.recv()
            except EOFError:
                raise AutoparError(f"process {rank} failed; its error stands above") from None
            if kind == "error":
                raise content
            if kind == "report" and on_report is not None:
                on_report(content)
            if kind == "result":
                results[rank] = content
                del open_ranks[connection]
    return [results[rank] for rank in range(len(connections))]


def _end(processes: Sequence[SpawnProcess]) -> None:
    for process in processes:
        process.join(timeout=5.0 if process.exitcode is None and sys.exc_info()[0] is None else 0.0)
        if process.is_alive():
            process.kill()
            process.join()


def _run(
    sender: Connection,
    rank: int,
    world_size: int,
    store: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Body of one process."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)

    def report(content: Any) -> None:
        if rank == 0:
            sender.send(("report", content))

    try:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=120),
        )
        result = function(report, *arguments)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except AutoparError as error:
        sender.send(("error", error))
    else:
        sender.send(("result", result))
