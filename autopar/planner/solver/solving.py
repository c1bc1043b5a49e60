"""Solve a Problem: the table of contents of this package.

1. Costs are cut at a ceiling (`ceilings`): FORBIDDEN is 1e6 s where a step takes 0.1 s, and 1e6 +- 1e-10
   would drown the proof in rounding. Cutting only lowers costs, so a bound for the cut problem holds for the
   original; if the best assignment uses no cut entry, its objective is the original one. Otherwise the
   ceiling rises and the solve repeats.
2. Without memory rows: `exact.solve_graph` (reductions, dual ascent, fixing, bucket elimination, HiGHS).
3. With memory rows: `memory.solve_within_budgets` (Lagrangian around 2., recombination, HiGHS).
4. The result is evaluated on the original arrays and carries its proof log (`certificate.check_certificate`
   replays it).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopar.planner.solver.arena import Arena
from autopar.planner.solver.budget_search import BudgetedOutcome
from autopar.planner.solver.budgets import solve_within_budgets
from autopar.planner.solver.deadline import Deadline, StopSwitch, interruptible
from autopar.planner.solver.exact import solve_graph
from autopar.planner.solver.labelling import Edge, Floats, Integers, Problem, evaluate, is_forbidden
from autopar.planner.solver.reductions import Graph
from autopar.planner.solver.solution import Certificate, Solution, Status, Warmth, relative_gap
from autopar.planner.solver.ties import merge_labels, merge_ties, spread_solution


def solve(
    problem: Problem,
    *,
    gap: float = 1e-9,
    time_limit: float | None = None,
    cpu_limit: float | None = None,
    warm_start: Integers | None = None,
    warm_multipliers: Sequence[float] | None = None,
    warm_messages: Warmth | None = None,
    stop: StopSwitch | None = None,
    stop_above: float = math.inf,
) -> Solution:
    """Return the best assignment found, a lower bound, and the proof of the bound.

    `gap` is relative to the objective; the solve stops there (status OPTIMAL), when its methods are spent
    (GAP), or after about `time_limit` seconds or `cpu_limit` seconds of this process (TIME_LIMIT), always with an
    assignment and a valid bound. When no assignment fits, status INFEASIBLE: `statistics["minimum_bytes"]` is the
    least that `statistics["memory_row"]` can use, attained by the assignment; or `statistics["forbidden"]` counts the
    FORBIDDEN choices that cannot be avoided. Equal problems give equal solutions unless a time limit strikes.
    `warm_start` is an assignment to improve on, `warm_messages` those of the solution of a similar problem.
    `stop`, or the first Ctrl-C, ends the time at once. A bound above `stop_above` ends the solve: that nothing is
    cheaper than something else is then all that was asked, and the assignment need not fit.
    Other statistics: method, rounds, sweeps, prices (multipliers tried), core_labels, cpu_seconds.

    Without a time limit, memory rows at the default gap may cost HiGHS a minute; a gap of 1e-3 takes seconds
    and needs no HiGHS for its bound. Raises ValueError when they are not of this problem's
    sizes.
    """
    started = time.process_time()
    _check_warm_start(problem, warm_start, warm_multipliers)
    if problem.ties:
        start = None if warm_start is None else merge_labels(problem, warm_start)
        merged = solve(
            merge_ties(problem),
            gap=gap,
            time_limit=time_limit,
            cpu_limit=cpu_limit,
            warm_start=start,
            warm_multipliers=warm_multipliers,
            warm_messages=warm_messages,
            stop=stop,
            stop_above=stop_above,
        )
        return spread_solution(problem, merged)
    with interruptible(Deadline.after(time_limit, stop, cpu_limit)) as deadline:
        for ceiling in ceilings(problem):
            cut = _cut(problem, ceiling)
            if problem.memory_rows:
                outcome = solve_within_budgets(
                    cut,
                    original=problem,
                    gap=gap,
                    deadline=deadline,
                    warm_start=warm_start,
                    warm_multipliers=warm_multipliers,
                    stop_above=stop_above,
                )
            else:
                outcome = _solve_without_budgets(cut, gap, deadline, warm_start, warm_messages, stop_above)
            if outcome.infeasible or deadline.left() <= 0.0 or outcome.bound > stop_above:
                break
            if not _uses_more_than(problem, outcome.assignment, ceiling):
                break
        return _solution(problem, outcome, ceiling, gap, deadline, started)


def ceilings(problem: Problem) -> Iterator[float]:
    """Yield ceilings in seconds: about what an ordinary assignment costs, then ever higher, at last none."""
    ceiling = 2.0 * _ordinary_cost(problem)
    largest = max(float(values.max()) for values in _distinct_arrays(problem))
    while 0.0 < ceiling < largest:
        yield ceiling
        ceiling *= 1e3
    yield math.inf


def _distinct_arrays(problem: Problem) -> list[Floats]:
    arrays = [*problem.node_costs, *(edge.costs for edge in problem.edges)]
    return list({id(values): values for values in arrays}.values())


def _ordinary_cost(problem: Problem) -> float:
    """Return the sum over nodes and edges of the median allowed cost."""
    known: dict[int, float] = {}
    total = 0.0
    for values in [*problem.node_costs, *(edge.costs for edge in problem.edges)]:
        if id(values) not in known:
            allowed = np.abs(values[~is_forbidden(values)])
            known[id(values)] = float(np.median(allowed)) if allowed.size else 0.0
        total += known[id(values)]
    return total


def _cut(problem: Problem, ceiling: float) -> Problem:
    if math.isinf(ceiling):
        return problem
    # One cut array per array, so that sharing survives.
    cut = {id(values): np.minimum(values, ceiling) for values in _distinct_arrays(problem)}
    edges = tuple(Edge(source=edge.source, target=edge.target, costs=cut[id(edge.costs)]) for edge in problem.edges)
    return replace(problem, node_costs=tuple(cut[id(costs)] for costs in problem.node_costs), edges=edges)


def _uses_more_than(problem: Problem, assignment: Integers, ceiling: float) -> bool:
    labels = assignment.tolist()
    return any(costs[label] > ceiling for costs, label in zip(problem.node_costs, labels, strict=True)) or any(
        edge.costs[labels[edge.source], labels[edge.target]] > ceiling for edge in problem.edges
    )


def _solve_without_budgets(
    problem: Problem,
    gap: float,
    deadline: Deadline,
    warm_start: Integers | None,
    warm_messages: Warmth | None,
    stop_above: float,
) -> BudgetedOutcome:
    edges = [(edge.source, edge.target, edge.costs) for edge in problem.edges]
    graph = Graph(Arena(), problem.node_costs, edges, tolerance=1e-15 * _ordinary_cost(problem))
    pool = () if warm_start is None else (warm_start,)
    outcome = solve_graph(graph, gap=gap, deadline=deadline, warmth=warm_messages, pool=pool, stop_above=stop_above)
    return BudgetedOutcome(
        assignment=outcome.assignment,
        bound=outcome.bound,
        proof=outcome.proof,
        multipliers=(),
        statistics={"method": outcome.method, "rounds": outcome.rounds, "sweeps": outcome.sweeps},
        messages=outcome.warmth,
    )


def _solution(
    problem: Problem, outcome: BudgetedOutcome, ceiling: float, gap: float, deadline: Deadline, started: float
) -> Solution:
    objective, used = evaluate(problem, outcome.assignment)
    fits = all(total <= row.budget_bytes for total, row in zip(used, problem.memory_rows, strict=True))
    most = objective if fits or outcome.infeasible else math.inf  # what does not fit may cost less than the optimum
    bound, proven = min(outcome.bound, most), min(outcome.proof.bound, most)
    reached = relative_gap(objective, bound)
    statistics = dict(outcome.statistics)
    status = _status(outcome.infeasible, fits, reached <= max(gap, 1e-9), deadline)
    forbidden = _count_forbidden(problem, outcome.assignment)
    if forbidden:
        statistics["forbidden"] = forbidden
        status = Status.INFEASIBLE if status is Status.OPTIMAL else status
    statistics["cpu_seconds"] = time.process_time() - started
    kind = "solver" if bound > proven else "elimination" if outcome.proof.eliminated else "messages"
    certificate = Certificate(
        kind=kind,
        proven_bound=proven,
        ceiling=ceiling,
        multipliers=outcome.multipliers,
        steps=outcome.proof.steps,
        messages=outcome.proof.messages,
    )
    return Solution(
        assignment=outcome.assignment,
        objective=objective,
        lower_bound=bound,
        gap=reached,
        status=status,
        certificate=certificate,
        statistics=statistics,
        messages=outcome.messages,
    )


def _status(infeasible: bool, fits: bool, closed: bool, deadline: Deadline) -> Status:
    if infeasible:
        return Status.INFEASIBLE
    if closed and fits:
        return Status.OPTIMAL
    return Status.GAP if fits and deadline.left() > 0.0 else Status.TIME_LIMIT


def _count_forbidden(problem: Problem, assignment: Integers) -> int:
    labels = assignment.tolist()
    nodes = sum(bool(is_forbidden(costs)[label]) for costs, label in zip(problem.node_costs, labels, strict=True))
    return nodes + sum(
        bool(is_forbidden(edge.costs[labels[edge.source], labels[edge.target]])) for edge in problem.edges
    )


def _check_warm_start(problem: Problem, warm_start: Integers | None, warm_multipliers: Sequence[float] | None) -> None:
    if warm_multipliers is not None and len(warm_multipliers) != len(problem.memory_rows):
        raise ValueError(
            f"{len(warm_multipliers)} warm multipliers for {len(problem.memory_rows)} memory rows: give one each"
        )
    if warm_start is None:
        return
    sizes = np.array([costs.size for costs in problem.node_costs])
    if warm_start.shape != sizes.shape or ((warm_start < 0) | (warm_start >= sizes)).any():
        raise ValueError(f"warm_start must give each of the {len(sizes)} nodes one of its labels")
