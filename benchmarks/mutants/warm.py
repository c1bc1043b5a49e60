"""A warm process: it has imported what others wrote (torch, transformers, pytest), and forks a child per mutant.

    stdin    {"tests": ["tests/test_files.py::test_x", ...], "seconds": 60.0}
    stdout   {"outcome": "failed", "test": "tests/test_files.py::test_x", "seconds": 1.8}

Only the child imports autopar and the tests, from the folder in which the process runs, so that each sees the files as
they are then; it writes no bytecode, which would outlive a mutant of the same length and second. It ends with its first
failure. One that is late is killed with all processes that it started.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

OURS = ("autopar", "benchmarks", "tests", "conftest", "__main__")


OUTCOMES = {0: "passed", 1: "failed", 5: "no tests", -1: "died"}
"""By the exit code of pytest; any other says that a test could not be imported."""


class Order:
    """Runs the tests as they were asked for, and remembers the first that failed."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.place = {test: place for place, test in enumerate(tests)}
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Behind the project's own order."""
        items.sort(key=self._place)

    def _place(self, item: pytest.Item) -> int:
        """Of a test that was asked for by its name or by that of its file."""
        return min(self.place.get(asked, len(self.place)) for asked in (item.nodeid, item.nodeid.partition("::")[0]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the first failure."""
        if report.failed and not self.failed:
            self.failed = report.nodeid


def child(tests: Sequence[str], answer: int) -> None:
    """Run the tests and write (exit code, first failure) to the descriptor `answer`; does not return."""
    os.setsid()
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silence, descriptor)
    order = Order(tests)
    code = 3
    try:
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins=[order]))
    finally:
        os.write(answer, json.dumps([code, order.failed]).encode())
        os._exit(0)


def run(tests: Sequence[str], seconds: float) -> dict[str, Any]:
    """What became of the tests: "passed", "failed" (and which), "not imported", "timeout" or "died"."""
    started = time.monotonic()
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        child(tests, writes)
    os.close(writes)
    ready, _, _ = select.select([reads], [], [], seconds)
    content = os.read(reads, 1 << 16) if ready else b""
    os.close(reads)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    code, test = json.loads(content) if content else (-1, "")
    outcome = OUTCOMES.get(code, "not imported")
    return {
        "outcome": outcome if ready else "timeout",
        "test": test,
        "seconds": round(time.monotonic() - started, 2),
    }


def main() -> None:
    """Serve until stdin ends. Arguments: modules to import beforehand; those that cannot be are left out."""
    sys.path.insert(0, os.getcwd())
    for name in json.loads(sys.stdin.readline()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    assert not [name for name in sys.modules if name.split(".")[0] == "autopar"]
    gc.collect()
    gc.freeze()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
    os._exit(0)  # libraries that are taken down one by one print what they leak


if __name__ == "__main__":
    main()
