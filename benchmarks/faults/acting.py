"""What a process of a fault does: it finds its fault by name, runs it, and tells what came of it.

The process is one that a template forked (`benchmarks/templates.py`). It stands as torchrun would have started it, with
torch's own time limits, ends as Python does (with what atexit holds), and is killed by whom the fault says.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from benchmarks.faults.fault import Action, Fault, Wrong, faults_in
from benchmarks.faults.verdicts import Ending, RankEnd

MOST_BYTES = 6 << 30
"""Of a process, so that a fault that eats memory does not end its neighbours."""

HEARTBEAT_SECONDS = "4"
"""What ranks are told to wait for each other, so that a row of a lost rank ends soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is sent to a process: its fault, found in `modules`, and its place. port: of the store, as of torchrun's
    agent. afterwards: whether it runs `then`."""

    name: str
    modules: tuple[str, ...]
    rank: int
    port: int
    folder: Path
    afterwards: bool = False


def faults_of(modules: Sequence[str]) -> dict[str, Fault]:
    """All faults of these modules by name, in their order."""
    found: dict[str, Fault] = {}
    for module in modules:
        for each in faults_in(vars(importlib.import_module(module))):
            assert each.name not in found, f"two faults are named {each.name}"
            found[each.name] = each
    return found


def act(connection: Connection) -> None:
    """Body of a process: one part, told by `connection`, and what came of it."""
    part: Part = connection.recv()
    asked = faults_of(part.modules)[part.name]
    _speak_into(part.folder / f"rank-{part.rank}.log")
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    os.environ.update(_environment(asked, part))
    os.chdir(part.folder)
    action = asked.then if part.afterwards else asked.run
    assert action is not None
    begin = time.monotonic()
    end = observed(asked, action, part.rank, part.folder, joined=asked.joined and asked.processes > 1)
    connection.send(replace(end, seconds=time.monotonic() - begin))
    threading._shutdown()  # type: ignore[attr-defined]  # as at the end of a Python process
    atexit._run_exitfuncs()


def observed(asked: Fault, action: Action, rank: int, folder: Path, *, joined: bool = False) -> RankEnd:
    """What comes of one process, in this one. joined: meet the others first."""
    try:
        if joined:
            dist.init_process_group("gloo")
        action(asked.scene(rank, folder))
    except BaseException as error:
        traceback.print_exc()
        return RankEnd(rank=rank, ending=_ending(error), message=_message(error), place=_place(error))
    return RankEnd(rank=rank, ending="returned")


def _ending(error: BaseException) -> Ending:
    if isinstance(error, Wrong):
        return "raised wrong"
    if isinstance(error, AutoparError):
        return "raised ours"
    return "raised torch's" if type(error) is RuntimeError else "raised other"


def _message(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:1500]


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"({Path(frames[-1].filename).as_posix().rpartition('site-packages/')[2]}:{frames[-1].lineno})"


def _speak_into(path: Path) -> None:
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - it is standard error
    logging.raiseExceptions = False  # a full disk, as some faults make, is full for the log too
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, force=True)  # the template's wrote elsewhere


def _environment(asked: Fault, part: Part) -> Mapping[str, str]:
    """The variables of torchrun where there are several processes, and where nothing of this machine is found."""
    found = {"AUTOPAR_CACHE": str(part.folder / "cache"), "AUTOPAR_HEARTBEAT": HEARTBEAT_SECONDS}
    torch.set_num_threads(1)
    if asked.processes > 1:
        found |= {
            "RANK": str(part.rank),
            "LOCAL_RANK": str(part.rank),
            "WORLD_SIZE": str(asked.processes),
            "LOCAL_WORLD_SIZE": str(asked.processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(part.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "faults",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    return found | dict(asked.environment)
