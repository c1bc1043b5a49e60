"""Planning: program + cluster -> Plan. The table of contents of the planner.

For every mesh: enumerate and price (`build`), solve under the memory limit (`solver`), lower for one rank to measure
transient memory, and predict. The mesh with the smallest objective wins; the known plans are solved beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.capture import fingerprint
from autopar.cluster import Cluster
from autopar.cost_models.memory import peak_over_time, usable_bytes
from autopar.cost_models.simulator import Timeline
from autopar.errors import ConfigurationError, InfeasibleError
from autopar.layout import Mesh
from autopar.parallel_plan import Baseline, ParameterPlan, Plan, Prediction
from autopar.passes.lower import lower
from autopar.passes.partition import memory_events, split_forward_backward
from autopar.phases import phase
from autopar.planner.blocks import find_blocks
from autopar.planner.build import Builder, Built
from autopar.planner.constraints import Constraints, check_axes, parse_constraints, resolve_meshes
from autopar.planner.factorisation import Factorisation
from autopar.planner.leaves import StateBytes
from autopar.planner.memory_rows import memory_rows
from autopar.planner.notes import expert_notes, uneven_notes
from autopar.planner.optimizers import resolve_optimizer, state_bytes
from autopar.planner.predict import predict_timeline
from autopar.planner.prices import Prices
from autopar.planner.read import (
    prices_hash,
    read_data,
    read_operators,
    read_parameters,
    replicated_flops_share,
    switching_costs,
)
from autopar.planner.search import SEARCH, Mode, Search
from autopar.planner.shortage import (
    MORE_DEVICES,
    Change,
    DoesNotFit,
    fullest_parts,
    with_mends,
    with_more_devices,
)
from autopar.planner.solver import Problem, Solution, Status, check_certificate, evaluate, is_forbidden, solve
from autopar.program import Program

Progress = Callable[[str], None]

EXACT_GAP = 1e-9
MEMORY_GAP = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Everything that a plan answers, besides the mesh."""

    program: Program
    cluster: Cluster
    state_bytes: Mapping[str, StateBytes]
    constraints: Constraints
    budget_bytes: float
    kernel_backend: str
    factorisation: Factorisation
    search: Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The optimum on one mesh."""

    mesh: Mesh
    plan: Plan
    built: Built
    solution: Solution


def make_plan(
    program: Program,
    cluster: Cluster,
    *,
    mesh: Sequence[int] | None = None,
    dims: Mapping[str, int] | None = None,
    optimizer: Any = None,
    memory_limit: float | str | None = None,
    constraints: object = None,
    parameter_layouts: Mapping[str, ParameterPlan] | None = None,
    question: Mapping[str, Any] | None = None,
    with_baselines: bool = True,
    mode: Mode = "default",
    progress: Progress | None = None,
) -> Plan:
    """The best plan for a captured program on a cluster.

    mesh: sizes only; dims: named axes (-1 fills). memory_limit: bytes per device, "72GiB", or a fraction of the
    device; default: the device less context and fragmentation. parameter_layouts: decisions to keep. mode: how long
    the solver may search (`planner.search`).
    Raises ConfigurationError for impossible arguments and InfeasibleError when nothing fits.
    """
    log = progress or (lambda message: None)
    parsed = parse_constraints(constraints, parameter_layouts)
    meshes = resolve_meshes(cluster.num_devices, mesh, dims, log)
    names = [entry.name for entry in program.inputs if entry.role == "parameter"]
    check_axes(parsed, meshes[0], names)
    query = Query(
        program=program,
        cluster=cluster,
        state_bytes=state_bytes(program, optimizer),
        constraints=parsed,
        budget_bytes=budget(memory_limit, cluster),
        kernel_backend=kernel_backend(cluster),
        factorisation=Factorisation(program),
        search=SEARCH[mode],
    )
    candidates, failures = _try_meshes(query, meshes, log)
    if not candidates and dims is None and query.search.tries_mends:
        candidates = [_of_known(c) for c in _try_meshes(query, _known_meshes(query, meshes, log), log)[0]]
    if not candidates:
        short = [failure for failure in failures if isinstance(failure, DoesNotFit)]
        raise _with_mends(query, min(short, key=lambda failure: failure.needed_bytes), log) if short else failures[0]
    best = min(candidates, key=lambda candidate: candidate.plan.objective_seconds)
    kind, _ = resolve_optimizer(optimizer)
    answer = {
        **(question or {}),
        "optimizer": kind if isinstance(kind, str) else kind.__name__,
        "optimizer_assumed": optimizer is None,
        "mode": mode,
        "memory_limit_bytes": query.budget_bytes,
        "cluster": cluster.name,
    }
    blocks = find_blocks(program)
    structure = {"blocks": blocks.num_blocks, "kinds_of_blocks": len(blocks.kinds), "cuts": len(blocks.cuts)}
    return replace(
        best.plan,
        question=answer,
        statistics={**best.plan.statistics, **structure},
        explanations=switching_costs(best.built, best.solution.assignment),
        alternatives=tuple(_as_baseline(candidate) for candidate in candidates if candidate is not best),
        baselines=_baselines(query, log) if with_baselines else (),
    )


def kernel_backend(cluster: Cluster) -> str:
    """Who emits kernels: PyTorch eager on CPUs, inductor on CUDA."""
    return "eager" if cluster.device.kind == "cpu" else "inductor"


def budget(memory_limit: float | str | None, cluster: Cluster) -> float:
    """Bytes per device: a number of bytes, "72GiB", "0.8" or 0.8 of the device; default: what is usable of it."""
    usable = usable_bytes(cluster.device.memory_bytes, cluster.device.kind)
    if memory_limit is None:
        return float(usable)
    try:
        value = parse_bytes(memory_limit)
    except ValueError as error:
        raise ConfigurationError(f"memory_limit={memory_limit!r}: write bytes, '72GiB' or a fraction") from error
    if value <= 0:
        raise ConfigurationError(f"memory_limit={memory_limit!r} must be positive")
    return value * usable if value <= 1 else value


def parse_bytes(text: float | str) -> float:
    """ "72GiB", "500MB", "1e9" or a number -> number. Raises ValueError."""
    if not isinstance(text, str):
        return float(text)
    units = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 1e3, "mb": 1e6, "gb": 1e9, "b": 1.0}
    lowered = text.strip().lower()
    for unit, factor in units.items():
        if lowered.endswith(unit):
            return float(lowered.removesuffix(unit)) * factor
    return float(lowered)


def known_plans(cluster: Cluster) -> dict[str, dict[str, int]]:
    """The plans that people write by hand for this cluster: name -> dims."""
    n, per_node = cluster.num_devices, cluster.devices_per_node
    if n == 1:
        return {}
    plans = {"DDP": {"dp_replicate": n}, "ZeRO-3": {"dp_shard": n}}
    if cluster.num_nodes > 1 and per_node > 1:
        plans["HSDP"] = {"dp_replicate": cluster.num_nodes, "dp_shard": per_node}
        plans["ZeRO-3 x TP"] = {"dp_shard": cluster.num_nodes, "tp": per_node}
    else:
        plans["Megatron TP"] = {"tp": n}
        if n % 2 == 0 and n > 2:
            plans["ZeRO-3 x TP"] = {"dp_shard": n // 2, "tp": 2}
    return plans


def plan_on_mesh(query: Query, mesh: Mesh, log: Progress) -> Candidate:
    """The optimum on one mesh, under the memory limit. Raises DoesNotFit."""
    prices = Prices(query.cluster, mesh)
    with phase("price"):
        built = Builder(
            query.program,
            mesh,
            prices,
            query.constraints,
            dict(query.state_bytes),
            query.kernel_backend,
            query.factorisation,
        ).build()
    free = _solve(built, mesh, query)
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
def _solve(built: Built, mesh: Mesh, query: Query) -> Solution:
    """The optimum without a memory limit. Raises InfeasibleError where the constraints leave nothing."""
    start = _first_labels(built.problem)
    solution = solve(built.problem, gap=EXACT_GAP, time_limit=query.search.exact_seconds, warm_start=start)
    forbidden = solution.statistics.get("forbidden", 0)
    if forbidden and solution.status is Status.INFEASIBLE:
        raise InfeasibleError(
            f"no plan obeys the constraints on mesh {mesh.shape}: the best one still makes {forbidden} forbidden "
            "choices; loosen constraints=, dims= or the pinned layouts"
        )
    if forbidden:
        raise InfeasibleError(
            f"found no plan that obeys the constraints on mesh {mesh.shape} in {query.search.exact_seconds:g} s: the "
            f'best one makes {forbidden} forbidden choices; search longer with mode="exact", or loosen the constraints'
        )
    return _checked(built.problem, solution)


@phase("solve")
def _within_memory(built: Built, mesh: Mesh, query: Query, free: Solution, limit: float) -> Solution:
    """The optimum under a memory limit: the free one where it fits, else a solve with the limit as rows."""
    rows = memory_rows(built, mesh, query.state_bytes, limit)
    if all(_row_bytes(row.bytes, free.assignment) <= limit for row in rows):
        return free
    limited = replace(built.problem, memory_rows=rows)
    solution = solve(limited, gap=MEMORY_GAP, time_limit=query.search.memory_seconds)
    fits = all(_row_bytes(row.bytes, solution.assignment) <= limit * (1 + 1e-9) for row in rows)
    if solution.status is Status.INFEASIBLE or not fits or solution.statistics.get("forbidden"):
        needed, parts = fullest_parts(built, rows, solution.assignment)
        raise DoesNotFit(mesh, needed + query.budget_bytes - limit, query.budget_bytes, parts)
    return _checked(limited, solution)


def _first_labels(problem: Problem) -> NDArray[np.int64] | None:
    """Everything replicated, which is the first label of all variables, where the constraints allow it: the search then
    never ends at its time limit without a valid plan."""
    labels = np.zeros(len(problem.node_costs), dtype=np.int64)
    objective, _ = evaluate(problem, labels)
    return labels if not is_forbidden(np.asarray(objective)) else None


def _checked(problem: Problem, solution: Solution) -> Solution:
    """The solution, after objective, memory and bound were recomputed by independent code from the original arrays."""
    check_certificate(problem, solution)
    return solution


def _row_bytes(entries: Mapping[int, NDArray[np.float64]], assignment: NDArray[np.int64]) -> float:
    return float(sum(weights[assignment[index]] for index, weights in entries.items()))


def _with_mends(query: Query, failure: DoesNotFit, log: Progress) -> InfeasibleError:
    """The failure with the changes that would fit: an optimizer without state, more devices."""
    if query.constraints.pinned or not query.search.tries_mends:
        return failure  # pinned parameters keep their layouts on this very mesh; there is nothing to change
    stateless = state_bytes(query.program, "SGD")
    log("nothing fits; trying an optimizer without state, and more devices")

    def on_more_devices(factor: int) -> Plan:
        mesh = Mesh(failure.mesh.axis_names, (factor * failure.mesh.shape[0], *failure.mesh.shape[1:]))
        return plan_on_mesh(replace(query, cluster=with_more_devices(query.cluster, factor)), mesh, log).plan

    devices = [
        Change(description=f"{factor * failure.mesh.size} devices", plan=partial(on_more_devices, factor))
        for factor in MORE_DEVICES
    ]
    without_state = Change(
        description="an optimizer without state (torch.optim.SGD)",
        plan=lambda: plan_on_mesh(replace(query, state_bytes=stateless), failure.mesh, log).plan,
    )
    has_state = any(query.state_bytes[name].optimizer > stateless[name].optimizer for name in stateless)
    return with_mends(failure, [[without_state] if has_state else [], devices])


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


def _cost_of(built: Built, node: Any, solution: Solution) -> float:
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


def _try_meshes(query: Query, meshes: Sequence[Mesh], log: Progress) -> tuple[list[Candidate], list[InfeasibleError]]:
    candidates: list[Candidate] = []
    failures: list[InfeasibleError] = []
    for mesh in meshes:
        try:
            candidates.append(plan_on_mesh(query, mesh, log))
        except InfeasibleError as error:
            log(f"mesh {mesh.shape}: {error}")
            failures.append(error)
    return candidates, failures


def _known_meshes(query: Query, meshes: Sequence[Mesh], log: Progress) -> list[Mesh]:
    """The known plans on meshes of these shapes. Their constraints leave a smaller space, in which the limited search
    under a tight memory limit finds plans that it misses in the whole."""
    shapes = {mesh.shape for mesh in meshes}
    devices = query.cluster.num_devices
    named = [resolve_meshes(devices, None, dims, log)[0] for dims in known_plans(query.cluster).values()]
    return [mesh for mesh in named if mesh.shape in shapes]


def _of_known(candidate: Candidate) -> Candidate:
    axes = "+".join(candidate.mesh.axis_names)
    note = f"the free search found nothing that fits: this is the optimum of the plans with the axes {axes}"
    return replace(candidate, plan=replace(candidate.plan, notes=(*candidate.plan.notes, note)))


def _as_baseline(candidate: Candidate) -> Baseline:
    dims = dict(zip(candidate.mesh.axis_names, candidate.mesh.shape, strict=True))
    return Baseline(
        name=f"mesh {'x'.join(map(str, candidate.mesh.shape))}",
        dims=dims,
        objective_seconds=candidate.plan.objective_seconds,
        predicted=candidate.plan.predicted,
    )


def _baselines(query: Query, log: Progress) -> tuple[Baseline, ...]:
    """The known plans, completed by the planner, on the same prices and without the user's own constraints."""
    free = replace(query, constraints=Constraints())
    found = []
    for name, dims in known_plans(query.cluster).items():
        mesh = resolve_meshes(query.cluster.num_devices, None, dims, log)[0]
        try:
            candidate = plan_on_mesh(free, mesh, log)
        except InfeasibleError as error:
            found.append(Baseline(name=name, dims=dims, error=str(error)))
            continue
        found.append(
            Baseline(
                name=name,
                dims=dims,
                objective_seconds=candidate.plan.objective_seconds,
                predicted=candidate.plan.predicted,
            )
        )
    return tuple(found)
