"""A module's own tests come first, files stay together, and the seconds are kept."""

from __future__ import annotations

import pytest

from benchmarks.mutants.choose_tests import SECONDS_A_FILE, choose, mirrored, within

TAKEN = {"a.py::slow": 5.0, "a.py::fast": 0.1, "b.py::fast": 0.2, "own.py::x": 1.0, "own.py::y": 0.5}


def test_the_tests_of_the_module_come_first_and_files_stay_together() -> None:
    found = within(dict.fromkeys(TAKEN), "own.py", TAKEN, 100.0)
    assert found.tests == ("own.py::y", "own.py::x", "a.py::fast", "a.py::slow", "b.py::fast")
    assert found.seconds == pytest.approx(6.8 + 3 * SECONDS_A_FILE)
    assert found.left_out == 0


def test_what_is_too_slow_is_left_out_and_counted_but_one_test_always_runs() -> None:
    found = within(dict.fromkeys(TAKEN), "own.py", TAKEN, 4.0)
    assert found.tests == ("own.py::y", "own.py::x", "a.py::fast", "b.py::fast")
    assert found.left_out == 1
    assert within({"a.py::slow": None}, "own.py", TAKEN, 1.0).tests == ("a.py::slow",)
    assert within({}, "own.py", TAKEN, 1.0).tests == ()


def test_tests_of_the_module_run_whether_they_reach_the_line_or_not() -> None:
    taken = {"tests/test_files.py::x": 0.1, "a.py::x": 0.1, "b.py::x": 0.1}
    assert choose("autopar/files.py", ["b.py::x"], taken).tests == ("tests/test_files.py::x", "b.py::x")


def test_tests_lie_where_their_modules_do() -> None:
    assert mirrored("autopar/planner/solver/ties.py") == "tests/planner/solver/test_ties.py"
    assert mirrored("cost_models/nccl.py") == "tests/cost_models/test_nccl.py"
    assert mirrored("autopar/_compat.py") == "tests/test_compat.py"
