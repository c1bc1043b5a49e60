"""A module's own tests come first, files stay together, and the seconds are kept."""

from __future__ import annotations

import pytest

from benchmarks.mutants.choose_tests import (
    IN_A_PROCESS,
    SECONDS_A_FILE,
    Chosen,
    choose,
    further,
    mirrored,
    own_files,
    within,
)

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


def test_a_survivor_meets_only_what_it_has_not_passed() -> None:
    chosen = Chosen(tests=("a.py::x", "b.py::x", "b.py::y"), seconds=3.0, left_out=0)
    assert further(chosen, {"a.py::x", "b.py::y"}).tests == ("b.py::x",)


def test_the_file_of_a_module_is_found_among_those_that_changed() -> None:
    files = ["tests/b.py", "tests/plans/test_x.py", "tests/a.py"]
    assert own_files("autopar/plans/x.py", files) == ["tests/plans/test_x.py"]
    assert own_files("autopar/plans/y.py", files) == []


def test_kernels_meet_the_test_that_runs_them_in_a_process() -> None:
    test = f"{IN_A_PROCESS['runtime/kernels/triton_']}[interpreted_kernels-114]"
    taken = {test: 4.0, "tests/runtime/kernels/test_registry.py::other": 0.1}
    assert choose("runtime/kernels/triton_gated.py", [], taken).tests == (test,)
    assert choose("runtime/kernels/registry.py", [], taken).tests == tuple(sorted(taken, key=lambda name: taken[name]))
    files = ["tests/a.py", "tests/runtime/kernels/test_registry.py"]
    assert own_files("runtime/kernels/triton_gated.py", files) == [files[1]]
