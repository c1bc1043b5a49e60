"""OR-tools' linear solvers: a `LinearProgram` in, a `LinearSolution` out.

MathOpt's protocol buffer takes whole columns of triplets (0.05 s for 160,000 variables, and no scipy). `mip.py` loads
this file when there is something to solve: a plan that was made elsewhere runs where OR-tools is not installed.
"""

from __future__ import annotations

import numpy as np
from ortools.math_opt import (
    callback_pb2,
    model_parameters_pb2,
    model_pb2,
    parameters_pb2,
    result_pb2,
)
from ortools.math_opt.core.python import solver

from autopar.planner.solver.labelling import Floats
from autopar.planner.solver.linear_program import LinearProgram, LinearSolution


def solve_linear(program: LinearProgram, solver_name: str, time_limit: float, relative_gap: float) -> LinearSolution:
    """Solve a program by "HIGHS" or "GLOP"; time_limit: seconds."""
    kind = parameters_pb2.SolverTypeProto.Value(f"SOLVER_TYPE_{solver_name}")
    parameters = parameters_pb2.SolveParametersProto()
    parameters.time_limit.FromMilliseconds(max(1, int(1000 * time_limit)))
    if kind == parameters_pb2.SOLVER_TYPE_HIGHS:
        parameters.relative_gap_tolerance = relative_gap
        parameters.absolute_gap_tolerance = 0.0
    result = solver.solve(
        _to_proto(program),
        kind,
        parameters_pb2.SolverInitializerProto(),
        parameters,
        model_parameters_pb2.ModelSolveParametersProto(),
        None,
        callback_pb2.CallbackRegistrationProto(),
        None,
        None,
    )
    return _read(result, len(program.objective), len(program.row_lower))


def _to_proto(program: LinearProgram) -> model_pb2.ModelProto:
    size = len(program.objective)
    model = model_pb2.ModelProto()
    model.variables.ids.extend(range(size))
    model.variables.lower_bounds.extend([0.0] * size)
    model.variables.upper_bounds.extend(program.upper.tolist())
    model.variables.integers.extend([True] * program.num_binary + [False] * (size - program.num_binary))
    used = np.flatnonzero(program.objective)
    model.objective.linear_coefficients.ids.extend(used.tolist())
    model.objective.linear_coefficients.values.extend(program.objective[used].tolist())
    model.linear_constraints.ids.extend(range(len(program.row_lower)))
    model.linear_constraints.lower_bounds.extend(program.row_lower.tolist())
    model.linear_constraints.upper_bounds.extend(program.row_upper.tolist())
    present = np.flatnonzero(program.values)
    model.linear_constraint_matrix.row_ids.extend(program.rows[present].tolist())
    model.linear_constraint_matrix.column_ids.extend(program.columns[present].tolist())
    model.linear_constraint_matrix.coefficients.extend(program.values[present].tolist())
    return model


def _read(result: result_pb2.SolveResultProto, size: int, num_rows: int) -> LinearSolution:
    reason = result.termination.reason
    values, duals, objective = None, None, np.inf
    if result.solutions and result.solutions[0].HasField("primal_solution"):
        primal = result.solutions[0].primal_solution
        values, objective = _dense(primal.variable_values, size), float(primal.objective_value)
    if result.solutions and result.solutions[0].HasField("dual_solution"):
        duals = _dense(result.solutions[0].dual_solution.dual_values, num_rows)
    return LinearSolution(
        values=values,
        objective=objective,
        bound=float(result.termination.objective_bounds.dual_bound),
        infeasible=reason == result_pb2.TERMINATION_REASON_INFEASIBLE,
        duals=duals,
    )


def _dense(vector: object, size: int) -> Floats:
    dense = np.zeros(size)
    dense[np.array(vector.ids, dtype=np.int64)] = np.array(vector.values)  # type: ignore[attr-defined]
    return dense
