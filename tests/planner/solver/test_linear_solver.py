"""OR-tools is loaded when there is something to solve, and not before: a plan for one device needs none of it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from autopar.planner.solver.linear_program import LinearProgram
from autopar.planner.solver.linear_solver import solve_linear

SCRIPT = """
import sys
for name in ("ortools", "transformers", "rich", "click", "jinja2"):
    sys.modules[name] = None
import torch, autopar
x = torch.randn(4, 8)
loss = lambda out, batch: out.square().mean()
module = autopar.compile(torch.nn.Linear(8, 2), x, loss_fn=loss)
module(x).backward()
autopar.compile(torch.nn.Linear(8, 2), x, loss_fn=loss, plan=module.plan)(x).backward()
print("trained")
"""


def test_one_device_is_planned_and_runs_without_what_planning_for_many_needs() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert found.stdout == "trained\n", found.stderr


@pytest.mark.parametrize("name", ["HIGHS", "GLOP"])
def test_both_solvers_minimise(name: str) -> None:
    program = LinearProgram(
        objective=np.array([1.0, 2.0]),
        upper=np.full(2, np.inf),
        num_binary=0,
        rows=np.array([0, 0]),
        columns=np.array([0, 1]),
        values=np.ones(2),
        row_lower=np.array([3.0]),
        row_upper=np.array([3.0]),
    )
    found = solve_linear(program, name, 5.0, 1e-9)
    assert found.values is not None
    assert found.values.tolist() == pytest.approx([3.0, 0.0])
    assert found.objective == pytest.approx(3.0)
