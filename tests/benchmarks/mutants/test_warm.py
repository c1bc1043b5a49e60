"""A child per question: it sees the files as they are, stops at the first failure, and is killed when it is late."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = """
import time, own
def test_slow(): assert own.VALUE != 9 or time.sleep(60)
def test_value(): assert own.VALUE < 2
def test_never(): assert own.VALUE == 1
"""
ROOT = Path(__file__).parents[3]


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "test_own.py").write_text(TESTS)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.mutants.warm"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    yield process
    process.communicate()


def ask(warm: subprocess.Popen[str], question: Any) -> Any:
    assert warm.stdin is not None
    assert warm.stdout is not None
    warm.stdin.write(json.dumps(question) + "\n")
    warm.stdin.flush()
    return json.loads(warm.stdout.readline())


@pytest.mark.slow
def test_what_became_of_the_tests_is_said(warm: subprocess.Popen[str], tmp_path: Path) -> None:
    assert ask(warm, ["json", "no_such_module"]) == "ready"
    found = []
    for text, seconds in (("VALUE = 1", 60.0), ("VALUE = 2", 60.0), ("VALUE = 9", 1.0), ("VALUE =", 60.0)):
        (tmp_path / "own.py").write_text(text)
        tests = ["test_own.py::test_slow", "test_own.py::test_value", "test_own.py::test_never"]
        answer = ask(warm, {"tests": tests, "seconds": seconds})
        found.append((answer["outcome"], answer["test"]))
    assert found == [
        ("passed", ""), ("failed", "test_own.py::test_value"), ("timeout", ""), ("not imported", ""),
    ]  # fmt: skip
