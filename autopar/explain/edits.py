"""Edits: a plan changed by hand, completed, checked and priced again.

    {"lm_head.weight": "S(0)"}      the weight lies so on every axis; what reads it stays, shared copies follow
    {"lm_head": {"tp": "R"}}        what leaves the module is replicated over tp
    {"gather_once": True}           parameters are gathered, and gradients scattered, once per step

Everything that the edit does not name keeps its choice, if that can stand beside the edit; where it cannot, the
neighbours of the edit are chosen anew, with a note. Bound and gap of the edited plan say how far it is from the best
one that obeys the edit. Plans with stages also take edits of cut and schedule (`stage_edits.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.errors import ConfigurationError, InfeasibleError
from autopar.explain.completion import completed_beside, merged
from autopar.explain.recovered import query_of
from autopar.explain.source import Source
from autopar.explain.stage_edits import edited_stages, refuse_stage_changes
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.time_segments import module_segments
from autopar.planner.one_mesh.mesh_plan import price, read_plan
from autopar.planner.one_mesh.query import Query
from autopar.planner.one_mesh.read_solution import switching_costs
from autopar.planner.one_mesh.recovered_problem import expanded, recover
from autopar.planner.one_mesh.warm_start import Rows
from autopar.planner.problem.build import Built
from autopar.planner.problem.constraint_targets import meshes_with_axes
from autopar.planner.solver import solution_of, solve
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_bytes
from autopar.plans.rung_names import host_bytes
from autopar.request.constraints import parse_constraints

GATHER_ONCE = "gather_once"
BOUND_SECONDS = 10.0
"""CPU seconds of the search for the bound of an edited plan."""


def edited(source: Source, plan: Plan, changes: Mapping[str, object]) -> Plan:
    """The plan with the placements in `changes`, see the module docstring; without changes it is only checked and
    priced again. Raises ConfigurationError, PlanMismatchError and InfeasibleError."""
    if plan.in_stages:
        return edited_stages(source, plan, changes)
    refuse_stage_changes(changes)
    before, (plan, changes) = plan, _gathering(plan, changes)
    recovered = recover(query_of(source, plan), plan)
    if not changes:
        bound = before.bound_seconds
        if plan is not before:
            problem = recovered.built.problem
            bound = solve(problem, cpu_limit=BOUND_SECONDS, warm_start=recovered.labels).lower_bound
        return _read(recovered.query, plan, recovered.built, recovered.labels, bound, [])
    parsed = parse_constraints(dict(changes))
    if parsed.recompute or parsed.no_replicated_compute:
        raise ConfigurationError("edit takes placements; recompute= and no_replicated_compute are wishes of what_if")
    meshes_with_axes(parsed.placements, [plan.mesh])
    query = query_of(source, plan, replace(source.request, constraints=merged(source.request.constraints, changes)))
    lifetimes = Lifetimes(query.program, module_segments)
    built = price(query, plan.mesh)
    if recovered.built is not recovered.plain:
        built = expanded(query, built, lifetimes)
    labels, notes = completed_beside(built, plan)
    bound = solve(built.problem, cpu_limit=BOUND_SECONDS, warm_start=labels).lower_bound
    return _read(query, plan, built, labels, bound, notes)


def _gathering(plan: Plan, changes: Mapping[str, object]) -> tuple[Plan, Mapping[str, object]]:
    """The plan with `gather_once` as the edit says, itself where it says so, and the rest of the edit."""
    wanted = changes.get(GATHER_ONCE, plan.gather_once)
    if not isinstance(wanted, bool):
        raise ConfigurationError(f"{GATHER_ONCE} is {wanted!r}: write True or False")
    if wanted and (plan.micro_batches == 1 or plan.shards):
        raise ConfigurationError(
            f"{GATHER_ONCE}: this plan runs its batch in {'logical shards' if plan.shards else 'one part'}; it is for "
            "several micro-batches without deterministic="
        )
    changed = plan if wanted == plan.gather_once else replace(plan, gather_once=wanted)
    return changed, {name: change for name, change in changes.items() if name != GATHER_ONCE}


def _read(query: Query, plan: Plan, built: Built, labels: Rows, bound: float, notes: list[str]) -> Plan:
    """The plan of labels, lowered and measured. Raises InfeasibleError where it does not fit."""
    solution = solution_of(built.problem, labels, bound)
    attempt = read_plan(query, plan.mesh, built, solution, Lifetimes(query.program, module_segments))
    found = attempt.candidate.plan
    if found.predicted.peak_bytes <= query.budget_bytes and attempt.excess > 0:
        raise InfeasibleError(
            f"the edited plan has {format_bytes(host_bytes(found.predicted))} of each device on the host, "
            f"{format_bytes(attempt.excess)} more than there is room for"
        )
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
        explanations=switching_costs(built, labels, plan.mesh),
        notes=(*found.notes, *notes),
    )
