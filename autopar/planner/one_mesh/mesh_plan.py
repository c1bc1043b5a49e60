"""One mesh: price its strategies, solve, fit the plan into memory, lower it for one rank and predict it.

    built = price(query, mesh)                    the Problem and what its variables mean
    free = solve_free(query, built, mesh)         the optimum without a memory limit: a bound for every limit
    candidate = fit(query, built, mesh, free)     the optimum under the limit; raises DoesNotFit

What does not fit is solved again with recomputation and one memory row per moment (`within_memory.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.cost_models.copy_costs import host_optimizer_seconds
from autopar.errors import InfeasibleError
from autopar.graphs.forward_backward import Partition
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.passes.lowering.chain import add_up_parts, lowered_step
from autopar.passes.lowering.stage import LoweredStage
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.resident_states import ResidentStates, resident_states
from autopar.planner.memory.rungs import Rungs, bytes_by_rung
from autopar.planner.memory.shortage import DoesNotFit, SearchEnded
from autopar.planner.memory.step_bytes import step_bytes
from autopar.planner.memory.time_segments import module_segments
from autopar.planner.one_mesh.context_notes import context_notes
from autopar.planner.one_mesh.copy_ahead import with_copies_ahead
from autopar.planner.one_mesh.exchange_chunks import in_exchange_chunks
from autopar.planner.one_mesh.expert_axis_notes import expert_axis_notes
from autopar.planner.one_mesh.fewest_reruns import FewestReruns
from autopar.planner.one_mesh.forbidden_choices import forbidden_places, why_forbidden
from autopar.planner.one_mesh.hidden_communication import with_hidden
from autopar.planner.one_mesh.made_once import operators_once, variables_once
from autopar.planner.one_mesh.micro_costs import in_micro_batches
from autopar.planner.one_mesh.notes import (
    expert_notes,
    shard_notes,
    symmetric_notes,
    uneven_notes,
    wide_notes,
)
from autopar.planner.one_mesh.predict import choose_issue, dispatch_seconds, one_by_one
from autopar.planner.one_mesh.query import Query
from autopar.planner.one_mesh.read_solution import (
    flops_of_pass,
    form_statistics,
    implementation_statistics,
    prices_hash,
    read_data,
    read_operators,
    read_parameters,
    recomputation_statistics,
    replicated_flops_share,
)
from autopar.planner.one_mesh.restrict import restricted, why_nothing_obeys
from autopar.planner.one_mesh.shard_choices import in_logical_shards
from autopar.planner.one_mesh.warm_start import labels_like
from autopar.planner.one_mesh.within_memory import WithinMemory
from autopar.planner.problem.build import Built, build_problem
from autopar.planner.problem.limits import LIMITS
from autopar.planner.problem.prices import Floats, Prices
from autopar.planner.solver import Solution, Status, certified, evaluate, is_forbidden, solve
from autopar.plans.busiest_rank import busiest_place
from autopar.plans.parallel_plan import Plan
from autopar.plans.parallelism import rows_travel
from autopar.plans.plan_text import format_seconds
from autopar.plans.plan_value import Prediction
from autopar.plans.rung_names import host_bytes
from autopar.timing import phase
from autopar.young_garbage import young_garbage_only

log = logging.getLogger(__name__)

Labels: TypeAlias = NDArray[np.int64]
EXACT_GAP = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The optimum on one mesh."""

    mesh: Mesh
    plan: Plan
    built: Built
    solution: Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A candidate, what its program holds at every moment, and by how much that exceeds the limit, or what it has on
    the host its part of that."""

    candidate: Candidate
    measured: Floats
    excess: float


def plan_on_mesh(query: Query, mesh: Mesh, below: float = math.inf) -> Candidate:
    """The optimum on one mesh, under the memory limit. Raises InfeasibleError, also where without the limit it takes
    `below` seconds or more."""
    built = price(query, mesh)
    free = solve_free(query, built, mesh, stop_above=below)
    if free.lower_bound >= below:
        seconds = f"{format_seconds(free.lower_bound)} without a memory limit"
        raise InfeasibleError(f"not fitted into memory: mesh {mesh.shape} takes at least {seconds}")
    return fit(query, built, mesh, free)


@phase("price")
def price(query: Query, mesh: Mesh) -> Built:
    """Strategies and prices of everything on one mesh."""
    built = restricted(_whole(query, mesh), mesh, query.bound_constraints)
    if query.shards is not None:
        built = in_logical_shards(built, mesh, query.shards)
    if not query.hidden_share:
        return built
    return with_hidden(built, query.hidden_share, Prices(query.cluster, mesh), query.gathers)


def _whole(query: Query, mesh: Mesh) -> Built:
    """Before constraints take choices away, with all communication counted."""
    counted = replace(query, hidden_share=0.0)
    return query.kept.built.recall(counted.priced(mesh), lambda: _build(counted, mesh))


def _build(query: Query, mesh: Mesh) -> Built:
    prices = Prices(query.cluster, mesh)
    built = build_problem(
        query.program,
        mesh,
        prices,
        query.constraints,
        dict(query.state_bytes),
        query.kernel_backend,
        query.factorisation,
        query.offered,
    )
    if query.micro is None:
        return built
    once = frozenset[int]()
    if query.gather_once:
        once = variables_once(built, operators_once(built, Lifetimes(query.program)))
    return in_micro_batches(built, query.micro.count, prices, once, each_sum=query.shards is not None)


def as_it_is(query: Query, built: Built, mesh: Mesh, free: Solution) -> Candidate | None:
    """The optimum without a memory limit, lowered and played; None where its program holds more than there is, or where
    something is to be recomputed whatever the limit."""
    if _asks_for_recomputation(query):
        return None
    attempt = read_plan(query, mesh, built, free, Lifetimes(query.program, module_segments))
    return None if attempt.excess > 0 else attempt.candidate


def _asks_for_recomputation(query: Query) -> bool:
    return "full" in (query.recompute, *query.constraints.recompute.values())


def fit(
    query: Query,
    built: Built,
    mesh: Mesh,
    free: Solution,
    more_starts: Sequence[Labels] = (),
    most_labels: float = math.inf,
) -> Candidate:
    """The optimum under the memory limit, given the one without it, and other labels to start from, if any. Raises
    InfeasibleError, also where the limit binds and the problem with recomputation has more than `most_labels`."""
    lifetimes = Lifetimes(query.program, module_segments)
    starts = [free.assignment, *_given_labels(query, built, mesh), *more_starts]
    attempt = read_plan(query, mesh, built, free, lifetimes)
    if attempt.excess > 0 or _asks_for_recomputation(query):
        attempt = _shortest(query, built, lifetimes, attempt, starts, most_labels)
    plan = attempt.candidate.plan
    log.info(
        f"mesh {dict(zip(mesh.axis_names, mesh.shape, strict=True))}: objective {plan.objective_seconds * 1e3:.2f} ms, "
        f"bound {plan.bound_seconds * 1e3:.2f} ms, gap {plan.gap:.1e}, "
        f"predicted {plan.predicted.step_seconds * 1e3:.1f} ms"
    )
    return attempt.candidate


def _shortest(
    query: Query, built: Built, lifetimes: Lifetimes, free: Attempt, starts: Sequence[Labels], most_labels: float
) -> Attempt:
    """The shortest step that fits. Where the host may be used, it is not used all the same where that is shorter: what
    is made again may be cut in more ways beside a device alone."""
    questions = [query, replace(query, offload=None)] if query.may_wait_on_host else [query]
    found: list[Attempt] = []
    failure: InfeasibleError | None = None
    for question in questions:
        try:
            found.append(_fitted(question, built, lifetimes, free, starts, most_labels))
        except InfeasibleError as failed:
            failure = failure or failed
        if found and _step_seconds(found[0]) <= (1 + LIMITS.least_relief_of_reruns) * _step_seconds(free):
            break
    if not found:
        assert failure is not None
        raise failure
    return min(found, key=_step_seconds)


def _fitted(
    query: Query, built: Built, lifetimes: Lifetimes, free: Attempt, starts: Sequence[Labels], most_labels: float
) -> Attempt:
    too_large = dict[str, float]()
    searches = WithinMemory.each(query, free.candidate.mesh, built, lifetimes, starts, too_large)
    answer: Attempt | DoesNotFit
    try:
        answer = _recomputed(query, free, searches, most_labels, too_large)
    except DoesNotFit as failure:
        answer = failure
    return _fewest_reruns(query, built, lifetimes, free, answer)


def _recomputed(
    query: Query,
    attempt: Attempt,
    searches: Iterable[WithinMemory],
    most_labels: float,
    too_large: dict[str, float],
) -> Attempt:
    """What fits of the first search that finds something. A search that ends without a plan ends them all, but where
    the host was asked for: the one with copies that hide leaves room for them, which others fill. too_large: least
    bytes of the ways that `searches` leaves out, and then of those that failed."""
    failure: DoesNotFit | None = None
    ended: SearchEnded | None = None
    for search in searches:
        labels = sum(costs.size for costs in search.built.problem.node_costs)
        if labels > most_labels:
            raise InfeasibleError(
                f"not fitted into memory: with recomputation mesh {search.mesh.shape} has {labels} strategies, and up "
                f'to {most_labels:.0f} are searched; mode="max" searches more'
            )
        try:
            return _within_memory(query, attempt, search)
        except DoesNotFit as found:
            too_large[search.way] = min(found.needed_bytes, too_large.get(search.way, math.inf))
            failure = found if failure is None or found.needed_bytes < failure.needed_bytes else failure
        except SearchEnded as found:
            ended = found
            if failure is None and not query.may_wait_on_host:
                raise
    if ended is not None:
        raise ended
    assert failure is not None, "segments by themselves are tried in any case"
    raise failure.with_ways(too_large if len(too_large) > 1 else {})


def _fewest_reruns(
    query: Query, built: Built, lifetimes: Lifetimes, free: Attempt, found: Attempt | DoesNotFit
) -> Attempt:
    """What was found, or what runs less again in the same layouts (`fewest_reruns.py`). Raises what was found."""
    base = found if isinstance(found, Attempt) else free
    search = FewestReruns.of(query, built, lifetimes, base.candidate.plan, base.candidate.solution.assignment)
    costs_most = base.candidate.plan.objective_seconds * (1 - LIMITS.least_relief_of_reruns)
    if search is not None and (base is free or free.candidate.plan.objective_seconds < costs_most):
        search.learn(base.candidate.plan, base.measured)
        for _ in range(query.search.memory_rounds):
            answer = search.solve(free.candidate.solution.lower_bound)
            if answer is None:
                break
            attempt = read_plan(query, base.candidate.mesh, *answer)
            if attempt.excess <= 0:
                is_shorter = base is free or _step_seconds(attempt) < _step_seconds(base)
                return attempt if is_shorter else base
            search.learn(attempt.candidate.plan, attempt.measured)
    if isinstance(found, DoesNotFit):
        raise found
    return found


def _step_seconds(attempt: Attempt) -> float:
    return attempt.candidate.plan.predicted.step_seconds


def _within_memory(query: Query, attempt: Attempt, search: WithinMemory) -> Attempt:
    """Solve and measure until the lowered program fits, and once more where much of the limit is left: transients that
    an earlier plan showed were too large then. And with room left over, where communication that the sum leaves out
    shows all the same: gathers can only begin early where there is room for what they bring."""
    found: list[Attempt] = []
    mesh, free_bound = attempt.candidate.mesh, attempt.candidate.solution.lower_bound
    for _ in range(query.search.memory_rounds):
        search.learn(attempt.candidate.built, attempt.candidate.solution.assignment, attempt.measured)
        try:
            solution = search.solve()
        except InfeasibleError:
            if found:
                break
            raise
        if _is_same(attempt.candidate, search.built, solution):
            break  # what was measured and played would be so again
        attempt = read_plan(query, mesh, search.built, solution, search.lifetimes)
        attempt = _with_statistics(attempt, search.next_gib(solution, free_bound))
        if attempt.excess <= 0:
            found.append(attempt)
            if shows_beyond(attempt.candidate.plan) and not search.ahead:
                search.ahead = LIMITS.room_of_early_gathers * query.budget_bytes
                search.query = replace(query, stop_above=math.inf)  # its step is to be shorter, not its sum
                continue
            has_no_room = search.ahead and not attempt.candidate.plan.copy_ahead_bytes
            if len(found) > 1 or (attempt.excess > -LIMITS.unused_share * query.budget_bytes and not has_no_room):
                break
    if not found:
        predicted = attempt.candidate.plan.predicted
        raise DoesNotFit(mesh, predicted.peak_bytes, query.budget_bytes, predicted.bytes_by_kind)
    if search.ahead:  # what hides is known to the simulator alone
        return min(found, key=lambda each: each.candidate.plan.predicted.step_seconds)
    return min(found, key=lambda each: each.candidate.plan.objective_seconds)


def shows_beyond(plan: Plan) -> bool:
    """Whether communication that the sum of a plan takes as hidden is not."""
    longest = plan.objective_seconds * (1.0 + LIMITS.shown_beyond_the_sum)
    return plan.hidden_share > 0.0 and plan.predicted.step_seconds > longest


def hides_all(step: Prediction) -> bool:
    """Whether next to nothing of a step is communication that shows: meshes of other axes save no more than that."""
    return step.exposed_communication_seconds < LIMITS.least_exposed_share * step.step_seconds


def _with_statistics(attempt: Attempt, more: Mapping[str, float]) -> Attempt:
    candidate = attempt.candidate
    plan = replace(candidate.plan, statistics={**candidate.plan.statistics, **more})
    return replace(attempt, candidate=replace(candidate, plan=plan))


def _is_same(candidate: Candidate, built: Built, solution: Solution) -> bool:
    """Whether a candidate chose the same of everything, in the same problem."""
    return candidate.built is built and np.array_equal(candidate.solution.assignment, solution.assignment)


@phase("solve")
def solve_free(
    query: Query, built: Built, mesh: Mesh, more_starts: Sequence[Labels] = (), stop_above: float = math.inf
) -> Solution:
    """The optimum without a memory limit, from the best of the starts; or a bound above `stop_above`, and then the
    assignment may be anything. Raises InfeasibleError where the constraints leave nothing."""
    seconds = query.search.exact_seconds
    start = _first_labels(query, built, mesh, more_starts)
    solution = query.kept.solved.recall(
        (query.priced(mesh), query.constraints.placements),
        lambda: solve(
            built.problem,
            gap=EXACT_GAP,
            time_limit=query.seconds_left(),
            cpu_limit=seconds,
            warm_start=start,
            stop=query.deadline.stop,
            stop_above=stop_above,
        ),
        is_final=lambda found: found.status is Status.OPTIMAL,
    )
    forbidden = 0 if solution.lower_bound > stop_above else solution.statistics.get("forbidden", 0)
    if forbidden and solution.status is Status.INFEASIBLE:
        conflict = why_nothing_obeys(_whole(query, mesh), mesh, query.bound_constraints)
        raise conflict or why_forbidden(query, built, mesh, solution)
    if forbidden:
        raise InfeasibleError(
            f"found no plan that obeys the constraints on mesh {mesh.shape} in {seconds:.3g} s: the "
            f"best one cannot connect {forbidden_places(query, built, mesh, solution)}; search longer with "
            'mode="max", or loosen the constraints'
        )
    return certified(built.problem, solution)


def _first_labels(query: Query, built: Built, mesh: Mesh, more_starts: Sequence[Labels]) -> Labels | None:
    """The cheapest of the given labels and the older plan of the query, else everything replicated (the first label of
    all variables), where the constraints allow it: the search then never ends at its time limit without a valid plan.
    """
    given = [*more_starts, *_given_labels(query, built, mesh)]
    for starts in (given, [np.zeros(len(built.problem.node_costs), dtype=np.int64)]):
        costs = [evaluate(built.problem, labels)[0] for labels in starts]
        allowed = np.flatnonzero(~is_forbidden(np.array(costs)))
        if len(allowed):
            return starts[min(allowed.tolist(), key=costs.__getitem__)]
    return None


def _given_labels(query: Query, built: Built, mesh: Mesh) -> list[Labels]:
    """What the older plan of the query says, if there is one for this mesh."""
    like = None if query.warm_start is None else labels_like(built, mesh, query.warm_start)
    return [] if like is None else [like]


def read_plan(query: Query, mesh: Mesh, built: Built, solution: Solution, lifetimes: Lifetimes) -> Attempt:
    """The plan of a solution, lowered for one rank and measured."""
    with young_garbage_only():  # graphs by the dozen, all dropped
        plan, measured = _predicted(query, plan_of(query, mesh, built, solution, lifetimes), lifetimes)
    return Attempt(
        candidate=Candidate(mesh=mesh, plan=plan, built=built, solution=solution),
        measured=measured,
        excess=max(plan.predicted.peak_bytes - query.budget_bytes, _too_much_on_host(query.cluster, plan.predicted)),
    )


def _too_much_on_host(cluster: Cluster, predicted: Prediction) -> float:
    """Bytes of a rank on its host beyond its part of that; below 0 where there is room."""
    there = host_bytes(predicted)
    if not there or cluster.host is None:
        return -math.inf
    return there - cluster.host.bytes_per_device(cluster.devices_per_node)


def plan_of(query: Query, mesh: Mesh, built: Built, solution: Solution, lifetimes: Lifetimes) -> Plan:
    """What a solution says, without a prediction."""
    inputs, buffers, outputs = read_data(query.program, built, solution.assignment, mesh)
    problem, flops = built.problem, flops_of_pass(built)
    operators = read_operators(built, solution.assignment, mesh)
    return Plan(
        mesh=mesh,
        parameters=read_parameters(built, solution.assignment),
        operators=operators,
        inputs=inputs,
        buffers=buffers,
        outputs=outputs,
        predicted=Prediction(step_seconds=0.0, peak_bytes=0.0),
        objective_seconds=solution.objective,
        bound_seconds=solution.lower_bound,
        gap=solution.gap,
        fingerprint=query.fingerprint,
        cluster=query.cluster.name,
        profile=query.cluster.profile,
        kernel_backend=query.kernel_backend,
        kernels=query.kernels,
        micro_batches=1 if query.micro is None else query.micro.count,
        gather_once=query.gather_once,
        replicated_experts=query.replicated_experts,
        expert_order=query.expert_order,
        deterministic=query.deterministic,
        hidden_share=query.hidden_share,
        prices_hash=prices_hash(problem),
        uncovered={str(node.meta["operator"]): _cost_of(built, node, solution) for node in built.uncovered},
        notes=tuple(
            dict.fromkeys(
                [
                    *built.notes,
                    *uneven_notes(query.program, built, solution.assignment, mesh),
                    *context_notes(built, solution.assignment, mesh, query.constraints.cp),
                    *expert_axis_notes(
                        query.program, built, query.factorisation, solution.assignment, mesh, query.constraints.ep
                    ),
                    *expert_notes(query.program),
                    *wide_notes(built, query.cluster.device),
                    *shard_notes(query.deterministic, query.cluster.num_devices),
                ]
            )
        ),
        statistics={
            "variables": len(problem.node_costs),
            "strategies": sum(len(costs) for costs in problem.node_costs),
            "largest_menu": max(len(costs) for costs in problem.node_costs),
            "edges": len(problem.edges),
            "flops_of_pass": sum(flops.values()),
            "dtype_of_flops": next(iter(flops), "float32"),
            "replicated_flops_share": replicated_flops_share(built, solution.assignment, mesh),
            "certificate": solution.certificate.kind,
            **implementation_statistics(operators),
            **form_statistics(operators),
            **recomputation_statistics(built, solution.assignment, lifetimes),
        },
    )


def _cost_of(built: Built, node: fx.Node, solution: Solution) -> float:
    index = built.operators[node]
    return float(built.variables[index].costs[solution.assignment[index]])


def _predicted(query: Query, plan: Plan, lifetimes: Lifetimes) -> tuple[Plan, Floats]:
    """The plan with how it is issued and its prediction, and the bytes that every moment holds; rows that travel to
    their experts in as many chunks as make the step shortest."""
    whole = _issued(query, plan, lifetimes)
    if query.cluster.device.kind == "cpu" or not rows_travel(plan):
        return whole  # on CPUs as in `choose_issue`
    return in_exchange_chunks(whole, lambda cut: _issued(query, cut, lifetimes), query.budget_bytes)


def _issued(query: Query, plan: Plan, lifetimes: Lifetimes) -> tuple[Plan, Floats]:
    """The plan with its bucket sizes and its prediction, of the busiest rank, read from the lowered program; and the
    bytes that every moment holds."""
    with phase("lower"):
        rank = busiest_place(plan, plan.mesh, query.program)
        step = lowered_step(query.micro or query.program, plan, rank, until=add_up_parts)
    lowered = step.only.program
    states = resident_states(lowered, query.state_bytes, query.cluster.device)
    constant = states.bytes_beside(step.micro, lowered)
    with phase("predict"):
        def measure(stage: LoweredStage) -> Floats:
            return step_bytes(stage, lifetimes, constant, states.step_buffers)

        measured = measure(one_by_one(step))
        if float(np.nanmax(measured)) > query.budget_bytes:  # however it is issued: nobody asks for its step
            return _without_steps(plan, states, float(np.nanmax(measured))), measured
        issue, measured = choose_issue(step, query.cluster, measure, query.budget_bytes, measured)
        if plan.waits_on_host:
            issue, measured = with_copies_ahead(step, issue, query.cluster, measure, query.budget_bytes)
    peak = float(np.nanmax(measured))
    views = sum(dispatch_seconds(part.graph, query.cluster.device) for part in step.only.partition.graphs)
    views *= plan.micro_batches
    update = states.step_seconds + _seconds_on_host(query.cluster, states.host_traffic)
    compute = issue.compute_seconds + views + update
    prediction = Prediction(
        step_seconds=issue.seconds + views + update,
        peak_bytes=peak,
        compute_seconds=compute,
        exposed_communication_seconds=issue.exposed_communication_seconds,
        bytes_by_kind=_kinds(states, peak),
        bytes_by_rung=_rungs(plan, step.only.partition, lifetimes, states.host),
    )
    notes = (*plan.notes, *symmetric_notes(issue.symmetric))
    return replace(issue.of_plan(plan), predicted=prediction, notes=notes), measured


def _seconds_on_host(cluster: Cluster, traffic: float) -> float:
    """Of the optimizer's step for parameters that lie there."""
    return float(host_optimizer_seconds(cluster.host, traffic, cluster.devices_per_node)) if cluster.host else 0.0


def _without_steps(plan: Plan, states: ResidentStates, peak: float) -> Plan:
    """A plan that does not fit, with its bytes; of its step the sum that the search minimised is all that is known."""
    prediction = Prediction(step_seconds=plan.objective_seconds, peak_bytes=peak, bytes_by_kind=_kinds(states, peak))
    return replace(plan, bucket_bytes=None, product_chunks={}, symmetric_memory={}, predicted=prediction)


def _rungs(plan: Plan, partition: Partition, lifetimes: Lifetimes, states_on_host: float) -> dict[str, float]:
    """`bytes_by_rung`, or nothing where all is kept on the device."""
    rungs = Rungs.of(plan, lifetimes.alone)
    return bytes_by_rung(rungs, partition, states_on_host) if rungs.are_several else {}


def _kinds(states: ResidentStates, peak: float) -> dict[str, float]:
    rest = peak - states.parameters - states.optimizer
    return {
        "parameters": states.parameters,
        "optimizer state": states.optimizer,
        "activations, gradients and buffers at the peak": rest,
    }
