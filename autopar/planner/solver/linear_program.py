"""A linear program and its solution as arrays: what `mip.py` writes and `linear_solver.py` solves."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.planner.solver.labelling import Floats, Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProgram:
    """minimise objective.x, row_lower <= A x <= row_upper, 0 <= x <= upper; A as triplets sorted by row."""

    objective: Floats
    upper: Floats
    num_binary: int
    rows: Integers
    columns: Integers
    values: Floats
    row_lower: Floats
    row_upper: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSolution:
    """`values` is None without a feasible point; `bound` is proven; `duals` only for a linear program."""

    values: Floats | None
    objective: float
    bound: float
    infeasible: bool
    duals: Floats | None
