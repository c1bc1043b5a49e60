"""One mesh: price its strategies, solve, fit the plan into memory, lower it for one rank and predict it.

    built = price(query, mesh)                    the Problem and what its variables mean
    free = solve_free(query, built, mesh)         the optimum without a memory limit: a bound for every limit
    candidate = fit(query, built, mesh, free)     the optimum under the limit; raises DoesNotFit

The memory rows count what is saved; transient buffers are measured on the lowered program and taken off the budget,
so that the limit holds for the program that runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.capture import fingerprint
from autopar.cost_models.memory import peak_over_time
from autopar.cost_models.simulator import Timeline
from autopar.errors import InfeasibleError
from autopar.layout import Mesh
from autopar.parallel_plan import Plan, Prediction
from autopar.passes.lower import lower
from autopar.passes.partition import memory_events, split_forward_backward
from autopar.phases import phase
from autopar.plan_text import format_bytes
from autopar.planner.build import Builder, Built
from autopar.planner.memory_rows import memory_rows
from autopar.planner.notes import expert_notes, uneven_notes
from autopar.planner.predict import predict_timeline
from autopar.planner.prices import Prices
from autopar.planner.query import Progress, Query
from autopar.planner.read import prices_hash, read_data, read_operators, read_parameters, replicated_flops_share
from autopar.planner.restrict import restricted, why_nothing_obeys
from autopar.planner.shortage import DoesNotFit, fullest_parts
from autopar.planner.solver import Problem, Solution, Status, check_certificate, evaluate, is_forbidden, solve
from autopar.planner.warm_start import labels_like

EXACT_GAP = 1e-9
MEMORY_GAP = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The optimum on one mesh."""

    mesh: Mesh
    plan: Plan
    built: Built
    solution: Solution


def plan_on_mesh(query: Query, mesh: Mesh, log: Progress) -> Candidate:
    """The optimum on one mesh, under the memory limit. Raises InfeasibleError."""
    built = price(query, mesh)
    return fit(query, built, mesh, solve_free(query, built, mesh), log)


@phase("price")
def price(query: Query, mesh: Mesh) -> Built:
    """Strategies and prices of everything on one mesh."""
    whole = query.kept.built.recall(query.priced(mesh), lambda: _build(query, mesh))
    return restricted(whole, mesh, query.wishes)


def _build(query: Query, mesh: Mesh) -> Built:
    return Builder(
        query.program,
        mesh,
        Prices(query.cluster, mesh),
        query.constraints,
        dict(query.state_bytes),
        query.kernel_backend,
        query.factorisation,
    ).build()


def fit(query: Query, built: Built, mesh: Mesh, free: Solution, log: Progress) -> Candidate:
    """The optimum under the memory limit, given the one without it. Raises InfeasibleError."""
    prices = Prices(query.cluster, mesh)
    limit = query.budget_bytes
    for _ in range(query.search.memory_rounds):
        solution = _within_memory(built, mesh, query, free, limit)
        with phase("predict"):
            timeline = predict_timeline(query.program, built, solution.assignment, prices)
        plan = _read_plan(query, mesh, built, solution, timeline)
        excess = plan.predicted.peak_bytes - query.budget_bytes
        if excess <= 0:
            break
        limit -= excess
    else:
        raise DoesNotFit(mesh, plan.predicted.peak_bytes, query.budget_bytes, plan.predicted.bytes_by_kind)
    log(
        f"mesh {dict(zip(mesh.axis_names, mesh.shape, strict=True))}: objective {plan.objective_seconds * 1e3:.2f} ms, "
        f"bound {plan.bound_seconds * 1e3:.2f} ms, gap {plan.gap:.1e}, "
        f"predicted {plan.predicted.step_seconds * 1e3:.1f} ms"
    )
    return Candidate(mesh=mesh, plan=plan, built=built, solution=solution)


@phase("solve")
def solve_free(query: Query, built: Built, mesh: Mesh) -> Solution:
    """The optimum without a memory limit. Raises InfeasibleError where the constraints leave nothing."""
    seconds = query.seconds(query.search.exact_seconds)
    start = _first_labels(query, built, mesh)
    solution = query.kept.solved.recall(
        (query.priced(mesh), query.constraints.placements),
        lambda: solve(built.problem, gap=EXACT_GAP, time_limit=seconds, warm_start=start),
        is_final=lambda found: found.status is Status.OPTIMAL,
    )
    forbidden = solution.statistics.get("forbidden", 0)
    if forbidden and solution.status is Status.INFEASIBLE:
        whole = query.kept.built.recall(query.priced(mesh), lambda: _build(query, mesh))
        raise why_nothing_obeys(whole, mesh, query.wishes) or InfeasibleError(
            f"no plan obeys the constraints on mesh {mesh.shape}: the best one still makes {forbidden} forbidden "
            "choices; loosen constraints=, dims= or the pinned layouts"
        )
    if forbidden:
        raise InfeasibleError(
            f"found no plan that obeys the constraints on mesh {mesh.shape} in {seconds:.3g} s: the "
            f'best one makes {forbidden} forbidden choices; search longer with mode="max", or loosen the constraints'
        )
    return _checked(built.problem, solution)


@phase("solve")
def _within_memory(built: Built, mesh: Mesh, query: Query, free: Solution, limit: float) -> Solution:
    """The optimum under a memory limit: the free one where it fits, else a solve with the limit as rows."""
    rows = memory_rows(built, mesh, query.state_bytes, limit)
    if all(_row_bytes(row.bytes, free.assignment) <= limit for row in rows):
        return free
    limited = replace(built.problem, memory_rows=rows)
    seconds = query.seconds(query.search.memory_seconds)
    start = _first_labels(query, built, mesh) if query.warm_start else None
    solution = solve(limited, gap=MEMORY_GAP, time_limit=seconds, warm_start=start)
    fits = all(_row_bytes(row.bytes, solution.assignment) <= limit * (1 + 1e-9) for row in rows)
    if fits and solution.statistics.get("forbidden"):
        raise InfeasibleError(
            f"found no plan that obeys the constraints within {format_bytes(limit)} on mesh {mesh.shape} in "
            f'{seconds:.3g} s; search longer with mode="max", or loosen the constraints'
        )
    if solution.status is Status.INFEASIBLE or not fits:
        needed, parts = fullest_parts(built, rows, solution.assignment)
        raise DoesNotFit(mesh, needed + query.budget_bytes - limit, query.budget_bytes, parts)
    return _checked(limited, solution)


def _first_labels(query: Query, built: Built, mesh: Mesh) -> NDArray[np.int64] | None:
    """The older plan of the query, or everything replicated (the first label of all variables), where the constraints
    allow it: the search then never ends at its time limit without a valid plan."""
    like = None if query.warm_start is None else labels_like(built, mesh, query.warm_start)
    for labels in (like, np.zeros(len(built.problem.node_costs), dtype=np.int64)):
        if labels is not None and not is_forbidden(np.asarray(evaluate(built.problem, labels)[0])):
            return labels
    return None


def _checked(problem: Problem, solution: Solution) -> Solution:
    """The solution, after objective, memory and bound were recomputed by independent code from the original arrays."""
    check_certificate(problem, solution)
    return solution


def _row_bytes(entries: Mapping[int, NDArray[np.float64]], assignment: NDArray[np.int64]) -> float:
    return float(sum(weights[assignment[index]] for index, weights in entries.items()))


def _read_plan(query: Query, mesh: Mesh, built: Built, solution: Solution, timeline: Timeline) -> Plan:
    inputs, buffers, outputs = read_data(query.program, built, solution.assignment, mesh)
    problem = built.problem
    plan = Plan(
        mesh=mesh,
        parameters=read_parameters(built, solution.assignment),
        operators=read_operators(built, solution.assignment, mesh),
        inputs=inputs,
        buffers=buffers,
        outputs=outputs,
        predicted=Prediction(step_seconds=timeline.makespan_seconds, peak_bytes=0.0),
        objective_seconds=solution.objective,
        bound_seconds=solution.lower_bound,
        gap=solution.gap,
        fingerprint=fingerprint(query.program),
        cluster=query.cluster.name,
        profile=query.cluster.profile,
        kernel_backend=query.kernel_backend,
        prices_hash=prices_hash(problem),
        uncovered={str(node.meta["operator"]): _cost_of(built, node, solution) for node in built.uncovered},
        notes=tuple(
            dict.fromkeys(
                [
                    *built.notes,
                    *uneven_notes(query.program, built, solution.assignment, mesh),
                    *expert_notes(query.program),
                ]
            )
        ),
        statistics={
            "variables": len(problem.node_costs),
            "strategies": sum(len(costs) for costs in problem.node_costs),
            "largest_menu": max(len(costs) for costs in problem.node_costs),
            "edges": len(problem.edges),
            "replicated_flops_share": replicated_flops_share(built, solution.assignment, mesh),
            "certificate": solution.certificate.kind,
        },
    )
    return replace(plan, predicted=_prediction(query, plan, timeline))


def _cost_of(built: Built, node: fx.Node, solution: Solution) -> float:
    index = built.operators[node]
    return float(built.variables[index].costs[solution.assignment[index]])


def _prediction(query: Query, plan: Plan, timeline: Timeline) -> Prediction:
    """Peak bytes of rank 0 from the lowered program, with the parts that last the whole step."""
    with phase("lower"):
        lowered = lower(query.program, plan, rank=0)
    recomputed = [name for name, operator in plan.operators.items() if operator.recompute]
    peak = peak_over_time(memory_events(split_forward_backward(lowered, recomputed)))
    parameters = optimizer = 0.0
    for entry in lowered.inputs:
        if entry.role == "parameter":
            elements = math.prod(entry.shape)
            parameters += elements * entry.dtype.itemsize
            optimizer += elements * query.state_bytes[entry.name].optimizer
    return Prediction(
        step_seconds=timeline.makespan_seconds,
        peak_bytes=parameters + optimizer + peak.peak_bytes,
        compute_seconds=timeline.busy_seconds.get("compute", 0.0),
        exposed_communication_seconds=timeline.exposed_communication_seconds,
        bytes_by_kind={
            "parameters": parameters,
            "optimizer state": optimizer,
            "activations, gradients and buffers at the peak": peak.peak_bytes,
        },
    )
