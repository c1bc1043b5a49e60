"""OR-tools' part: HiGHS for a small core, GLOP for linear programs. The only file that imports a solver library.

A core becomes the local-polytope program (x one-hot per node, y the pair indicators, with their marginals tied to x):
    minimise  c.x + sum_uv R_uv.y_uv     s.t.  sum_i x_v[i] = 1,   sum_j y_uv[i, j] = x_u[i],   sum_i y_uv[i, j] = x_v[j],
              sum_v m_kv.x_v <= b_k,     x binary, y >= 0.
Only x must be binary: y follows. Costs are divided by `scale`, because the tolerances of the solvers are absolute.

MathOpt's protocol buffer takes whole columns of triplets (0.05 s for 160,000 variables, and no scipy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.math_opt import (
    callback_pb2,
    model_parameters_pb2,
    model_pb2,
    parameters_pb2,
    result_pb2,
)
from ortools.math_opt.core.python import solver

from autopar.planner.solver.problem import Floats, Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProgram:
    """minimise objective.x, row_lower <= A x <= row_upper, 0 <= x <= upper; A as triplets sorted by (row, column)."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSolution:
    """Label positions (or None), their objective and the proven bound, seconds; `infeasible` when no labels fit."""

    labels: Integers | None
    objective: float
    bound: float
    infeasible: bool


def solve_core(
    node_costs: Sequence[Floats],
    edges: Sequence[tuple[int, int, Floats]],
    *,
    time_limit: float,
    weights: Sequence[Floats] = (),
    budgets: Floats | None = None,
    integral: bool = True,
    relative_gap: float = 1e-9,
) -> CoreSolution:
    """Solve a core with HiGHS; `weights[v]` is (rows, d_v), `budgets` (rows,) of the same unit. `integral=False`: its LP, by GLOP."""
    scale = max(float(np.median([np.ptp(costs) for costs in node_costs])), 1e-12 * _largest(node_costs, edges), 1e-300)
    program = core_program(node_costs, edges, scale, weights, budgets)
    if integral:
        found = _run(program, parameters_pb2.SOLVER_TYPE_HIGHS, time_limit, relative_gap)
    else:
        found = _run(program, parameters_pb2.SOLVER_TYPE_GLOP, time_limit, relative_gap)
    labels = None
    if found.values is not None:
        starts = np.cumsum([0] + [costs.size for costs in node_costs])
        labels = np.array(
            [int(found.values[a:b].argmax()) for a, b in zip(starts[:-1], starts[1:], strict=True)], dtype=np.int64
        )
    return CoreSolution(
        labels=labels, objective=found.objective * scale, bound=found.bound * scale, infeasible=found.infeasible
    )


def solve_master(costs: Floats, usage: Floats, penalty: float) -> tuple[float, Floats]:
    """Return (value, multipliers >= 0) of the Dantzig-Wolfe master, by GLOP.

    minimise costs.x + penalty * sum(excess)   s.t.  usage x <= 1 + excess,  sum x = 1;   `usage` is (rows, plans) in budgets.
    """
    rows, plans = usage.shape
    row_index, column_index = np.indices(usage.shape)
    matrix_rows = np.concatenate([row_index.ravel(), np.arange(rows), np.full(plans, rows)])
    matrix_columns = np.concatenate([column_index.ravel(), plans + np.arange(rows), np.arange(plans)])
    values = np.concatenate([usage.ravel(), -np.ones(rows), np.ones(plans)])
    order = np.lexsort((matrix_columns, matrix_rows))
    scale = max(float(np.abs(costs).max()), 1e-300)
    program = LinearProgram(
        objective=np.concatenate([costs, np.full(rows, penalty)]) / scale,
        upper=np.full(plans + rows, np.inf),
        num_binary=0,
        rows=matrix_rows[order],
        columns=matrix_columns[order],
        values=values[order],
        row_lower=np.concatenate([np.full(rows, -np.inf), [1.0]]),
        row_upper=np.ones(rows + 1),
    )
    found = _run(program, parameters_pb2.SOLVER_TYPE_GLOP, 60.0, 1e-9)
    if found.duals is None:
        raise RuntimeError(f"GLOP did not solve the master program of {plans} plans and {rows} memory rows")
    return found.objective * scale, np.maximum(-found.duals[:rows] * scale, 0.0)


def core_program(
    node_costs: Sequence[Floats],
    edges: Sequence[tuple[int, int, Floats]],
    scale: float,
    weights: Sequence[Floats],
    budgets: Floats | None,
) -> LinearProgram:
    """Write a core as the program of the module docstring."""
    starts = np.cumsum([0] + [costs.size for costs in node_costs])
    labels, num_nodes = int(starts[-1]), len(node_costs)
    rows = [np.repeat(np.arange(num_nodes), np.diff(starts))]
    columns = [np.arange(labels)]
    values = [np.ones(labels)]
    objective = [np.concatenate(node_costs)]
    row, column = num_nodes, labels
    for u, v, costs in edges:
        pairs = column + np.arange(costs.size).reshape(costs.shape)
        for end, marginal in ((u, pairs), (v, pairs.T)):
            own = row + np.arange(len(marginal))
            rows += [np.repeat(own, marginal.shape[1]), own]
            columns += [marginal.ravel(), starts[end] + np.arange(len(marginal))]
            values += [np.ones(costs.size), -np.ones(len(marginal))]
            row += len(marginal)
        objective.append(costs.ravel())
        column += costs.size
    right = np.concatenate([np.ones(num_nodes), np.zeros(row - num_nodes)])
    lower = upper = right
    if budgets is not None:
        table = np.concatenate(weights, axis=1) / np.maximum(np.abs(budgets), 1.0)[:, None]
        rows.append(np.repeat(row + np.arange(len(budgets)), labels))
        columns.append(np.tile(np.arange(labels), len(budgets)))
        values.append(table.ravel())
        lower = np.concatenate([right, np.full(len(budgets), -np.inf)])
        upper = np.concatenate([right, budgets / np.maximum(np.abs(budgets), 1.0)])
    all_rows, all_columns = np.concatenate(rows), np.concatenate(columns)
    order = np.lexsort((all_columns, all_rows))
    return LinearProgram(
        objective=np.concatenate(objective) / scale,
        upper=np.ones(column),
        num_binary=labels,
        rows=all_rows[order],
        columns=all_columns[order],
        values=np.concatenate(values)[order],
        row_lower=lower,
        row_upper=upper,
    )


def _largest(node_costs: Sequence[Floats], edges: Sequence[tuple[int, int, Floats]]) -> float:
    arrays = [*node_costs, *(costs for _, _, costs in edges)]
    return max((float(np.abs(values).max()) for values in arrays), default=0.0)


def _run(program: LinearProgram, kind: int, time_limit: float, relative_gap: float) -> LinearSolution:
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
