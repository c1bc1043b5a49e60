"""A rank as a fork of this process: what was imported and captured here is there at once, and is made once for all.

    process = fork(lambda: train(...), namespace="autopar-netlab-4711-0-n2", environment={"RANK": "2"}, log=None)
    process.wait()                                 # the exit code, as of a `subprocess.Popen`

Only a process without other threads may be forked; a pool of threads would be a memory of one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from autopar.errors import AutoparError
from benchmarks.netlab.machine import NAMESPACES

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Fork:
    """A forked process, with as much of `subprocess.Popen` as `processes.py` asks for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._ended(os.WNOHANG)

    def wait(self) -> int:
        """The exit code, once there is one."""
        code = self._ended(0)
        assert code is not None
        return code

    def _ended(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def fork(call: Callable[[], None], *, namespace: str, environment: Mapping[str, str], log: Path | None) -> Fork:
    """`call` in a session of its own inside of a network namespace, writing to `log` (None: where we write).

    It ends with this process. Raises AutoparError where this process has other threads, which a fork would lose with
    the locks that they hold.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise AutoparError(f"a process of {threads} threads cannot be forked: start the ranks as commands")
    sys.stdout.flush()
    sys.stderr.flush()
    parent, pid = os.getpid(), os.fork()
    if pid:
        return Fork(pid)
    _run(call, parent, namespace, environment, log)


def _run(
    call: Callable[[], None], parent: int, namespace: str, environment: Mapping[str, str], log: Path | None
) -> NoReturn:
    """The child. It never returns, so that nothing which the parent has begun is ended by it."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        _checked(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")
        if os.getppid() != parent:
            os._exit(code)
        with (NAMESPACES / namespace).open() as file:
            _checked(_LIBC.setns(file.fileno(), _CLONE_NEWNET), f"setns {namespace}")
        if log is not None:
            sys.stdout = sys.stderr = log.open("w", buffering=1)
            for stream in (1, 2):  # what writes below Python
                os.dup2(sys.stdout.fileno(), stream)
        os.environ.update(environment)
        call()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _checked(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
