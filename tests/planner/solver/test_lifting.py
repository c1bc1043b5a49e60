import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from autopar.planner.solver import Problem, check_certificate, exact, lifting, solve

SCRIPT = """
import hashlib
from tests.planner.solver.conftest import build_layers
from autopar.planner.solver import exact, lifting, solve
exact.FIRST_ENTRIES = 0
lifting.FEWEST_NODES = 50
solution = solve(build_layers(12))
print(hashlib.sha256(solution.assignment.tobytes()).hexdigest(), solution.objective.hex(), solution.lower_bound.hex())
"""


@pytest.fixture(autouse=True)
def sweeps_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """These problems could be eliminated at once, too."""
    monkeypatch.setattr(exact, "FIRST_ENTRIES", 0)


def test_lifting_changes_neither_optimum_nor_proof(
    monkeypatch: pytest.MonkeyPatch, layers: Callable[..., Problem]
) -> None:
    problem = layers(12)
    monkeypatch.setattr(lifting, "FEWEST_NODES", 10_000)
    plain = solve(problem)
    used = []
    original = lifting.shorten
    monkeypatch.setattr(lifting, "shorten", lambda core: used.append(original(core)) or used[-1])
    monkeypatch.setattr(lifting, "FEWEST_NODES", 50)
    lifted = solve(problem)
    assert used[0] is not None
    check_certificate(problem, lifted)
    assert np.isclose(lifted.objective, plain.objective, rtol=1e-9)


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_a_bound_above_the_cutoff_ends_the_solve_and_is_proven(
    monkeypatch: pytest.MonkeyPatch, layers: Callable[..., Problem], share: float
) -> None:
    monkeypatch.setattr(lifting, "FEWEST_NODES", 50)
    problem = layers(12)
    whole = solve(problem)
    stopped = solve(problem, stop_above=share * whole.objective)
    check_certificate(problem, stopped)
    assert stopped.lower_bound <= whole.objective * (1 + 1e-9) <= stopped.objective * (1 + 2e-9)
    if share < 1:
        assert stopped.lower_bound > share * whole.objective
        assert int(stopped.statistics["sweeps"]) < int(whole.statistics["sweeps"])
    else:
        assert stopped.objective == whole.objective


def test_small_tables_are_eliminated_before_the_first_sweep(
    monkeypatch: pytest.MonkeyPatch, layers: Callable[..., Problem]
) -> None:
    problem = layers(12)
    swept = solve(problem)
    monkeypatch.setattr(exact, "FIRST_ENTRIES", 30_000_000)
    eliminated = solve(problem)
    check_certificate(problem, eliminated)
    assert int(swept.statistics["sweeps"]) > 0 == int(eliminated.statistics["sweeps"])
    assert eliminated.statistics["method"] == "bucket elimination"
    assert np.isclose(eliminated.objective, swept.objective, rtol=1e-9)


def test_two_processes_find_the_same_assignment() -> None:
    answers = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        answers.append(done.stdout)
    assert answers[0] == answers[1] != ""
