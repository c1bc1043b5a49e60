"""OR-tools' part: HiGHS for a small core, GLOP for linear programs. No other file imports a solver library.

A core becomes the local-polytope program (x one-hot per node, y the pair indicators, with their marginals
tied to x):
    minimise    c.x + sum_uv R_uv.y_uv
    subject to  sum_i x_v[i] = 1,   sum_j y_uv[i, j] = x_u[i],   sum_i y_uv[i, j] = x_v[j],
                sum_v m_kv.x_v <= b_k,   x binary,   y >= 0.
Only x must be binary: y follows. Costs are divided by `scale`, because the tolerances of the solvers are
absolute.

MathOpt's protocol buffer takes whole columns of triplets (0.05 s for 160,000 variables, and no scipy).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.math_opt import (
    callback_pb2,
    model_parameters_pb2,
    model_pb2,
    parameters_pb2,
    result_pb2,
)
from ortools.math_opt.core.python import solver

from autopar.planner.solver.deadline import StopSwitch
from autopar.planner.solver.labelling import Floats, Integers

LOOK_SECONDS = 0.02
"""How often the waiting thread looks whether it should stop."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSolution:
    """Label positions (None if none was found), objective and bound in seconds; `infeasible` if none fit."""

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
    relative_gap: float = 1e-9,
    stop: StopSwitch | None = None,
) -> CoreSolution:
    """Solve a core with HiGHS; `weights[v]` is (rows, d_v), `budgets` (rows,) of the same unit.

    Once `stop` is pressed, nothing is returned: no labels, and no bound.
    """
    scale = _typical_cost(node_costs, edges)
    program = core_program(node_costs, edges, scale, weights, budgets)
    found = _run_until(stop or StopSwitch(), program, time_limit, relative_gap)
    labels = None
    if found.values is not None:
        starts = np.cumsum([0] + [costs.size for costs in node_costs])
        labels = np.array(
            [int(found.values[a:b].argmax()) for a, b in itertools.pairwise(starts)],
            dtype=np.int64,
        )
    return CoreSolution(
        labels=labels,
        objective=found.objective * scale,
        bound=found.bound * scale,
        infeasible=found.infeasible,
    )


def solve_master(costs: Floats, usage: Floats, penalty: float) -> tuple[float, Floats]:
    """Return (value, multipliers >= 0) of the Dantzig-Wolfe master, by GLOP.

    minimise costs.x + penalty * sum(excess)   s.t.  usage x <= 1 + excess,  sum x = 1;   `usage` is (rows,
    plans) in budgets.
    """
    rows, plans = usage.shape
    entries = _Entries()
    number, plan = np.indices(usage.shape)
    entries.add(number.ravel(), plan.ravel(), usage.ravel())
    entries.add(np.arange(rows), plans + np.arange(rows), -np.ones(rows))
    entries.add(np.full(plans, rows), np.arange(plans), np.ones(plans))
    matrix_rows, matrix_columns, values = entries.sorted()
    scale = max(float(np.abs(costs).max()), 1e-300)
    program = LinearProgram(
        objective=np.concatenate([costs, np.full(rows, penalty)]) / scale,
        upper=np.full(plans + rows, np.inf),
        num_binary=0,
        rows=matrix_rows,
        columns=matrix_columns,
        values=values,
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
    entries = _Entries()
    entries.add(np.repeat(np.arange(num_nodes), np.diff(starts)), np.arange(labels), np.ones(labels))
    row, column = num_nodes, labels
    for u, v, costs in edges:
        pairs = column + np.arange(costs.size).reshape(costs.shape)
        entries.add_marginal(row, pairs, int(starts[u]))
        entries.add_marginal(row + len(pairs), np.asarray(pairs.T), int(starts[v]))
        row, column = row + sum(costs.shape), column + costs.size
    right = np.concatenate([np.ones(num_nodes), np.zeros(row - num_nodes)])
    lower = upper = right
    if budgets is not None:
        units = np.maximum(np.abs(budgets), 1.0)
        table = np.concatenate(weights, axis=1) / units[:, None]
        number, label = np.indices(table.shape)
        entries.add((row + number).ravel(), label.ravel(), table.ravel())
        lower = np.concatenate([right, np.full(len(budgets), -np.inf)])
        upper = np.concatenate([right, budgets / units])
    rows, columns, values = entries.sorted()
    objective = np.concatenate([*node_costs, *(costs.ravel() for _, _, costs in edges)])
    return LinearProgram(
        objective=objective / scale,
        upper=np.ones(column),
        num_binary=labels,
        rows=rows,
        columns=columns,
        values=values,
        row_lower=lower,
        row_upper=upper,
    )


@dataclass(slots=True)
class _Entries:
    """Triplets of a matrix, collected in pieces."""

    rows: list[Integers] = field(default_factory=list)
    columns: list[Integers] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)

    def add(self, rows: Integers, columns: Integers, values: Floats) -> None:
        self.rows.append(rows)
        self.columns.append(columns)
        self.values.append(values)

    def add_marginal(self, row: int, pairs: Integers, start: int) -> None:
        """Rows that say: the pairs of each label (rows of `pairs`) sum to the label's own variable."""
        labels, others = pairs.shape
        self.add(row + np.repeat(np.arange(labels), others), pairs.ravel(), np.ones(pairs.size))
        self.add(row + np.arange(labels), start + np.arange(labels), -np.ones(labels))

    def sorted(self) -> tuple[Integers, Integers, Floats]:
        """Return rows, columns and values, sorted by row, then column."""
        rows, columns = np.concatenate(self.rows), np.concatenate(self.columns)
        order = np.lexsort((columns, rows))
        return rows[order], columns[order], np.concatenate(self.values)[order]


def _typical_cost(node_costs: Sequence[Floats], edges: Sequence[tuple[int, int, Floats]]) -> float:
    """Return a positive cost that makes what decides of order one, and nothing larger than 1e7."""
    spreads = np.array([np.ptp(values) for values in [*node_costs, *(costs for _, _, costs in edges)]])
    positive = spreads[spreads > 0.0]
    return float(max(np.median(positive), 1e-7 * positive.max())) if positive.size else 1.0


def _run_until(stop: StopSwitch, program: LinearProgram, time_limit: float, relative_gap: float) -> LinearSolution:
    """Run HiGHS beside this thread, which stays awake for signals; leave it alone once `stop` is pressed.

    HiGHS does not look at MathOpt's interrupter, so a run that was left ends at its own time limit, unheard.
    """
    found: list[LinearSolution] = []

    def work() -> None:
        found.append(_run(program, parameters_pb2.SOLVER_TYPE_HIGHS, time_limit, relative_gap))

    worker = threading.Thread(target=work, name="HiGHS", daemon=True)
    worker.start()
    while worker.is_alive() and not stop.pressed:
        worker.join(LOOK_SECONDS)
    if found:
        return found[0]
    if not stop.pressed:
        raise RuntimeError("HiGHS failed; its thread has printed why")
    return LinearSolution(values=None, objective=np.inf, bound=-np.inf, infeasible=False, duals=None)


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
