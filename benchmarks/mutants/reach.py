"""Which tests reach which lines: one run of the suite under the library `coverage`, one context per test.

    python -m pytest -p benchmarks.mutants.reach --reach FOLDER      each process writes its files there
    Reach.read(FOLDER).tests("cost_models/nccl.py", 138)             tests, and their seconds

What a fixture of a module or session reaches belongs to all tests of its file. Jobs on worker processes write files of
their own, under the name of the test that started them. Tests that failed are no evidence and are left out.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage
import pytest

from benchmarks import templates, workers

ALL_OF_FILE = "::*"
JOB = "benchmarks.mutants.reach:traced"
SLOWER = 4.0
"""How much longer a job may take under coverage."""


def recorder(folder: Path, context: str | None = None) -> coverage.Coverage:
    """A coverage of our modules that writes to a file of its own."""
    rooms = [f"{Path.cwd()}/{room}/*" for room in ("autopar", "cost_models", "passes", "runtime")]
    return coverage.Coverage(
        data_file=str(folder / f"{uuid.uuid4().hex}.coverage"), config_file=False, include=rooms, context=context,
        messages=False,
    )  # fmt: skip


def traced(job: str, context: str, folder: str, arguments: dict[str, Any], **report: Any) -> Any:
    """Run a job of a pool in its worker, under coverage."""
    module, _, name = job.partition(":")
    found = recorder(Path(folder), context)
    found.start()
    try:
        return getattr(importlib.import_module(module), name)(**arguments, **report)
    finally:
        found.stop()
        found.save()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--reach FOLDER`."""
    parser.addoption("--reach", type=Path, metavar="FOLDER")


def pytest_configure(config: pytest.Config) -> None:
    """Record in every process that runs tests."""
    folder = config.getoption("--reach")
    if folder is not None and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        folder.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(Recording(folder), "reach-recording")


class Recording:
    """The hooks of one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.coverage = recorder(folder)
        self.coverage.start()
        self.context = ""
        self.seconds: dict[str, float] = {}
        self.not_passed: set[str] = set()
        self._trace_jobs()

    def _trace_jobs(self) -> None:
        run, prepare = workers.Pool.run, templates.Templates.prepare

        @functools.wraps(run)
        def run_traced(
            pool: workers.Pool, target: str, *, world_size: int = workers.WORKERS, timeout: float = 120.0,
            on_report: Any = None, **arguments: Any,
        ) -> list[Any]:  # fmt: skip
            return run(
                pool, JOB, world_size=world_size, timeout=SLOWER * timeout, on_report=on_report, job=target,
                context=self.context, folder=str(self.folder), arguments=arguments,
            )  # fmt: skip

        @functools.wraps(prepare)
        def prepare_job(known: templates.Templates, target: str, arguments: Any) -> None:
            if target == JOB:
                target, arguments = arguments["job"], arguments["arguments"]
            prepare(known, target, arguments)

        workers.Pool.run = run_traced  # type: ignore[assignment, method-assign]
        templates.Templates.prepare = prepare_job  # type: ignore[assignment, method-assign]

    def _switch(self, context: str) -> None:
        self.context = context
        self.coverage.switch_context(context)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """One context per test."""
        self._switch(item.nodeid)
        try:
            return (yield)
        finally:
            self._switch("")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
        """What tests share belongs to all of them."""
        if fixturedef.scope == "function":
            return (yield)
        before = self.context
        self._switch(before.partition("::")[0] + ALL_OF_FILE)
        try:
            return (yield)
        finally:
            self._switch(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Seconds of every test, its part of the setup included."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.not_passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write what was recorded."""
        self.coverage.stop()
        self.coverage.save()
        passed = {test: seconds for test, seconds in self.seconds.items() if test not in self.not_passed}
        imported = sorted(name for name in sys.modules if "." not in name.partition(".")[0])
        document = {"tests": passed, "not_passed": sorted(self.not_passed), "imported": imported}
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(document))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What the files of one folder say. seconds: of every test that passed; not_passed: the others, which were skipped
    or failed; imported: names of modules."""

    data: coverage.CoverageData
    root: Path
    seconds: dict[str, float]
    not_passed: tuple[str, ...]
    imported: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path, root: Path) -> Reach:
        """Join the files of all processes. root: of the tree whose tests ran."""
        data = coverage.CoverageData(basename=str(folder / "joined"), no_disk=False)
        if not (folder / "joined").exists():
            for path in sorted(folder.glob("*.coverage")):
                part = coverage.CoverageData(basename=str(path))
                part.read()
                data.update(part)
        data.read()
        documents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        seconds = {test: taken for document in documents for test, taken in document["tests"].items()}
        not_passed = tuple(sorted(test for document in documents for test in document["not_passed"]))
        imported = tuple(sorted({name for document in documents for name in document["imported"]}))
        return cls(data=data, root=root, seconds=seconds, not_passed=not_passed, imported=imported)

    def tests(self, path: str, line: int) -> list[str]:
        """The tests that reach a line; for one that runs at import only, those that reach its file."""
        lines = self.data.contexts_by_lineno(str(self.root / path))
        here = set(lines.get(line, ())) - {""}
        return self._named(here or {context for contexts in lines.values() for context in contexts})

    def _named(self, contexts: set[str]) -> list[str]:
        files = {context.removesuffix(ALL_OF_FILE) for context in contexts if context.endswith(ALL_OF_FILE)}
        return [test for test in self.seconds if test in contexts or test.partition("::")[0] in files]
