"""Which tests a mutant has to pass, in which order: those of its own module first, then fast files before slow ones.

    autopar/files.py:40    tests/test_files.py ..., then tests/plans/... that reach line 40, until the seconds are spent

Tests of one file run one behind the other, so that what they share is made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

SECONDS = 40.0
"""Of tests, as they took alone, that a mutant may survive."""
SECONDS_A_FILE = 0.3
"""To import a file of tests."""
IN_A_PROCESS = {"runtime/kernels/triton_": "tests/runtime/kernels/test_registry.py::test_numerics_in_the_interpreter"}
"""Modules, by how their paths begin, that a test runs in a process of its own, where no record sees their lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """tests: in their order; seconds: that they took when they were recorded; left_out: tests that reach the line and
    are too slow beside the others."""

    tests: tuple[str, ...]
    seconds: float
    left_out: int


def mirrored(path: str) -> str:
    """The file of tests of a module, whether it exists or not: tests/planner/solver/test_ties.py."""
    inside = PurePosixPath(path)
    folder = inside.parent.relative_to("autopar") if inside.parts[0] == "autopar" else inside.parent
    return (PurePosixPath("tests") / folder / f"test_{inside.stem.lstrip('_')}.py").as_posix()


def choose(path: str, reaching: Iterable[str], taken: Mapping[str, float], seconds: float = SECONDS) -> Chosen:
    """The tests for a mutant of a module. reaching: those that reach its line; taken: seconds of every test."""
    named = [test for begin, test in IN_A_PROCESS.items() if path.startswith(begin)]
    own = [test for test in taken if test.partition("::")[0] == mirrored(path) or test.partition("[")[0] in named]
    return within(dict.fromkeys([*own, *reaching]), mirrored(path), taken, seconds)


def within(tests: Mapping[str, None], first: str, taken: Mapping[str, float], seconds: float) -> Chosen:
    """As many of these tests as take so many seconds, those of the file `first` in front."""
    files: dict[str, list[str]] = {}
    for test in sorted(tests, key=lambda test: taken[test]):
        files.setdefault(test.partition("::")[0], []).append(test)
    order: Sequence[str] = sorted(files, key=lambda file: (file != first, taken[files[file][0]]))
    chosen: list[str] = []
    spent = 0.0
    for file in order:
        spent += SECONDS_A_FILE
        for test in files[file]:
            if spent + taken[test] > seconds and chosen:
                break
            spent += taken[test]
            chosen.append(test)
        if spent >= seconds:
            break
    return Chosen(tests=tuple(chosen), seconds=round(spent, 2), left_out=len(tests) - len(chosen))


def further(chosen: Chosen, before: Set[str]) -> Chosen:
    """Without those that the mutant has passed before."""
    return replace(chosen, tests=tuple(test for test in chosen.tests if test not in before))


def own_files(path: str, files: Iterable[str]) -> list[str]:
    """Those of the files of tests that are about the module `path`."""
    own = {mirrored(path), *(test.partition("::")[0] for begin, test in IN_A_PROCESS.items() if path.startswith(begin))}
    return sorted(own.intersection(files))
