"""The raw problem, as it is, given to OR-tools' HiGHS and CP-SAT with a time limit: what our exact solver is for.

Both get the local-polytope program: one binary per strategy, one variable per pair of strategies of an edge, tied to
the binaries by their sums. CP-SAT counts in whole numbers: its unit is the best objective / 1e8.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from ortools.sat.python import cp_model

from autopar.capture import capture, normalize_example_inputs
from autopar.planner.meshes.mesh_shapes import resolve_meshes
from autopar.planner.one_mesh.mesh_plan import price
from autopar.planner.one_mesh.query import Query
from autopar.planner.solver import Problem, is_forbidden, solve
from autopar.planner.solver.mip import solve_core
from autopar.request import Request
from benchmarks.models import workload
from benchmarks.planner.cases import Case
from benchmarks.planner.measure import cluster_of

MAX_VARIABLES = {"HiGHS": 400_000, "CP-SAT": 400_000}
"""Above this the model alone takes more memory and time than the comparison is worth; such rows say so."""
CP_SAT_UNIT = 1e-8


def compare_raw(case: Case, seconds: float) -> dict[str, Any]:
    """Objective, bound and CPU seconds of ours, HiGHS and CP-SAT on the problem of one case without a memory limit."""
    problem = raw_problem(case)
    variables = raw_variables(problem)
    started = time.process_time()
    ours = solve(problem)
    row: dict[str, Any] = {
        "case": case.name,
        "nodes": len(problem.node_costs),
        "raw_variables": variables,
        "ours": _answer(ours.objective, ours.lower_bound, started),
    }
    for name, run in (("HiGHS", _highs), ("CP-SAT", _cp_sat)):
        if variables > MAX_VARIABLES[name]:
            row[name] = {"not_started": f"{variables} variables"}
        else:
            row[name] = run(problem, seconds, ours.objective)
    return row


def raw_problem(case: Case) -> Problem:
    """The Problem that the planner solves for a case on its given mesh."""
    assert case.mesh is not None
    model, inputs = workload(case.workload, batch=case.batch)
    program = capture(model, *normalize_example_inputs(inputs))
    cluster = cluster_of(case.devices)
    query = Query.of(program, Request(cluster=cluster, optimizer=torch.optim.AdamW))
    return price(query, resolve_meshes(cluster, case.mesh, None)[0]).problem


def raw_variables(problem: Problem) -> int:
    """Strategies and pairs of strategies."""
    return sum(costs.size for costs in problem.node_costs) + sum(edge.costs.size for edge in problem.edges)


def _answer(objective: float | None, bound: float | None, started: float) -> dict[str, Any]:
    return {
        "objective_seconds": objective,
        "bound_seconds": bound,
        "cpu_seconds": time.process_time() - started,
    }


def _highs(problem: Problem, seconds: float, best: float) -> dict[str, Any]:
    started = time.process_time()
    found = solve_core(
        problem.node_costs,
        [(edge.source, edge.target, edge.costs) for edge in problem.edges],
        time_limit=seconds,
    )
    has_plan = found.labels is not None
    bound = found.bound if np.isfinite(found.bound) else None
    return _answer(found.objective if has_plan else None, bound, started)


def _cp_sat(problem: Problem, seconds: float, best: float) -> dict[str, Any]:
    started = time.process_time()
    unit = CP_SAT_UNIT * best
    model = cp_model.CpModel()
    chosen = [[model.new_bool_var("") for _ in costs] for costs in problem.node_costs]
    terms: list[Any] = []
    weights: list[int] = []
    for literals, costs in zip(chosen, problem.node_costs, strict=True):
        model.add_exactly_one(
            [literal for literal, cost in zip(literals, costs, strict=True) if not is_forbidden(cost)]
        )
        for literal, cost in zip(literals, costs.tolist(), strict=True):
            if is_forbidden(np.asarray(cost)):
                model.add(literal == 0)
            else:
                terms.append(literal)
                weights.append(round(cost / unit))
    for edge in problem.edges:
        pairs = [[model.new_bool_var("") for _ in row] for row in edge.costs]
        for literal, row in zip(chosen[edge.source], pairs, strict=True):
            model.add(sum(row) == literal)
        for literal, column in zip(chosen[edge.target], zip(*pairs, strict=True), strict=True):
            model.add(sum(column) == literal)
        for row, costs in zip(pairs, edge.costs.tolist(), strict=True):
            for pair, cost in zip(row, costs, strict=True):
                if is_forbidden(np.asarray(cost)):
                    model.add(pair == 0)
                elif cost:
                    terms.append(pair)
                    weights.append(round(cost / unit))
    model.minimize(cp_model.LinearExpr.weighted_sum(terms, weights))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    has_plan = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return _answer(solver.objective_value * unit if has_plan else None, solver.best_objective_bound * unit, started)
