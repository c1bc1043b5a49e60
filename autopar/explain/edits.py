"""Edits: a plan changed by hand, completed, checked and priced again.

    {"lm_head.weight": "S(0)"}      the weight lies so on every axis; what reads it stays, shared copies follow
    {"lm_head": {"tp": "R"}}        what leaves the module is replicated over tp

Everything that the edit does not name keeps its choice, if that can stand beside the edit; where it cannot, the
neighbours of the edit are chosen anew, with a note. Bound and gap of the edited plan say how far it is from the best
one that obeys the edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.errors import ConfigurationError, InfeasibleError, PlanMismatchError
from autopar.explain.recovered import query_of
from autopar.explain.source import Source
from autopar.parallel_plan import Plan
from autopar.plan_text import format_bytes
from autopar.planner.build import Built
from autopar.planner.constraints import parse_constraints
from autopar.planner.lifetimes import Lifetimes
from autopar.planner.one_mesh import price, read_plan
from autopar.planner.query import Query
from autopar.planner.read import switching_costs
from autopar.planner.recover import agreeing, completed, expanded, recover
from autopar.planner.resolve import solution_of
from autopar.planner.solver import solve
from autopar.planner.targets import meshes_with_axes
from autopar.planner.warm_start import Rows

BOUND_SECONDS = 10.0
"""CPU seconds of the search for the bound of an edited plan."""


def edited(source: Source, plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """The plan with the placements in `changes`, see the module docstring; without changes it is only checked and
    priced again. Raises ConfigurationError, PlanMismatchError and InfeasibleError."""
    recovered = recover(query_of(source, plan), plan)
    if not changes:
        return _read(recovered.query, plan, recovered.built, recovered.labels, plan.bound_seconds, [])
    parsed = parse_constraints(dict(changes))
    if parsed.recompute or parsed.no_replicated_compute:
        raise ConfigurationError("edit takes placements; recompute= and no_replicated_compute are wishes of what_if")
    meshes_with_axes(parsed.placements, [plan.mesh])
    query = query_of(source, plan, replace(source.options, constraints=_merged(source.options.constraints, changes)))
    lifetimes = Lifetimes(query.program)
    built = price(query, plan.mesh)
    if recovered.built is not recovered.plain:
        built = expanded(query, built, lifetimes)
    labels, notes = _completed(built, plan)
    bound = solve(built.problem, cpu_limit=BOUND_SECONDS, warm_start=labels).lower_bound
    return _read(query, plan, built, labels, bound, notes)


def _merged(constraints: object, changes: Mapping[str, Any]) -> object:
    """The wishes under which a plan was made, with those of the edit in place of equal ones."""
    return {**constraints, **changes} if isinstance(constraints, Mapping) else dict(changes)


def _completed(built: Built, plan: Plan) -> tuple[Rows, list[str]]:
    """Labels that keep what they can of the plan, and notes on what else had to change."""
    rows, changed = {}, set()
    for index, variable in enumerate(built.variables):
        same = agreeing(variable, built, plan)
        if not len(same):
            changed.add(index)
        rows[index] = np.arange(len(variable.costs)) if variable.kind == "copy" or not len(same) else same
    try:
        return completed(built, rows), []
    except PlanMismatchError as reason:
        moved = changed | {i for i, variable in enumerate(built.variables) if variable.kind == "copy"}
        near = {edge.target for edge in built.problem.edges if edge.source in moved}
        near |= {edge.source for edge in built.problem.edges if edge.target in moved}
        free = {index: np.arange(len(built.variables[index].costs)) for index in near}
        return completed(built, {**rows, **free}), [f"edited by hand, and neighbours were chosen anew: {reason}"]


def _read(query: Query, plan: Plan, built: Built, labels: Rows, bound: float, notes: list[str]) -> Plan:
    """The plan of labels, lowered and measured. Raises InfeasibleError where it does not fit."""
    solution = solution_of(built.problem, labels, bound)
    attempt = read_plan(query, plan.mesh, built, solution, Lifetimes(query.program))
    found = attempt.candidate.plan
    if attempt.excess > 0:
        raise InfeasibleError(
            f"the edited plan needs {format_bytes(found.predicted.peak_bytes)} per device, the limit is "
            f"{format_bytes(query.budget_bytes)}: {format_bytes(attempt.excess)} too much"
        )
    return replace(
        found,
        question=plan.question,
        baselines=plan.baselines,
        alternatives=plan.alternatives,
        explanations=switching_costs(built, labels),
        notes=(*found.notes, *notes),
    )
