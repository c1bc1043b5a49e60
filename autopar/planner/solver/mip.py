"""What OR-tools is given: a small core for HiGHS, the master program for GLOP. `linear_solver.py` hands it over.

A core becomes the local-polytope program (x one-hot per node, y the pair indicators, with their marginals
tied to x):
    minimise    c.x + sum_uv R_uv.y_uv
    subject to  sum_i x_v[i] = 1,   sum_j y_uv[i, j] = x_u[i],   sum_i y_uv[i, j] = x_v[j],
                sum_v m_kv.x_v <= b_k,   x binary,   y >= 0.
Only x must be binary: y follows. Costs are divided by `scale`, because the tolerances of the solvers are
absolute.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.later import later
from autopar.planner.solver.deadline import StopSwitch
from autopar.planner.solver.labelling import Floats, Integers
from autopar.planner.solver.linear_program import LinearProgram, LinearSolution

solve_linear: Callable[..., LinearSolution] = later("autopar.planner.solver.linear_solver", "solve_linear")

LOOK_SECONDS = 0.02
"""How often the waiting thread looks whether it should stop."""
ROUNDING = 1e-12
"""Of a budget: what is smaller is an error of doubles."""


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
    plans) in budgets. What differs from nothing by rounding is nothing: scaled up, it would be a row that GLOP gives
    up on.
    """
    rows, plans = usage.shape
    usage = np.where(np.abs(usage) < ROUNDING, 0.0, usage)
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
    found = solve_linear(program, "GLOP", 60.0, 1e-9)
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
        found.append(solve_linear(program, "HIGHS", time_limit, relative_gap))

    worker = threading.Thread(target=work, name="HiGHS", daemon=True)
    worker.start()
    while worker.is_alive() and not stop.pressed:
        worker.join(LOOK_SECONDS)
    if found:
        return found[0]
    if not stop.pressed:
        raise RuntimeError("HiGHS failed; its thread has printed why")
    return LinearSolution(values=None, objective=np.inf, bound=-np.inf, infeasible=False, duals=None)
