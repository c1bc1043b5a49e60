"""The end of a solve under budgets: labels go by their bounds until HiGHS can finish what is left.

polish       many sweeps at the best price: the last that messages can prove
recombine    HiGHS on the labels of good plans: can only find plans
close        HiGHS on every label that a better plan may still use: its bound ends the solve
"""

from __future__ import annotations

import numpy as np

from autopar.planner.solver import mip
from autopar.planner.solver.assignments import FITS
from autopar.planner.solver.better_plans import activate_exceeded, improve
from autopar.planner.solver.budget_search import BudgetSearch
from autopar.planner.solver.exact import core_of, start_ascent
from autopar.planner.solver.first_fit import nothing_fits
from autopar.planner.solver.mixtures import priced, restricted
from autopar.planner.solver.reductions import Graph, back_substitute, simplify

LAST_SWEEPS = 40
RECOMBINE_SECONDS, CLOSE_SECONDS = 30.0, 60.0
RECOMBINE_LABELS, CLOSE_LABELS = 6_000, 15_000
"""HiGHS is not started above this many labels: it would find nothing in the time."""
REFIX_LABELS = 100_000
"""Above this many labels bounds are not raised once more: with a price per layer no two layers share a table."""
REFIX_ROUNDS, REFIX_LOOKS, REFIX_SWEEPS = 8, 2, 15


def polish(search: BudgetSearch) -> None:
    """Raise the bound at the best multipliers, and improve once more."""
    search.look(search.multipliers, LAST_SWEEPS)
    if not search.finished():
        improve(search)


def recombine(search: BudgetSearch) -> None:
    """Solve, by HiGHS, the problem restricted to the labels of good plans."""
    good = [plan.labels for plan in search.plans.promising(search.multipliers, 12, 4)]
    trial = restricted(search.graph, good)
    if trial.num_labels() <= RECOMBINE_LABELS:
        _branch(search, trial, min(RECOMBINE_SECONDS, search.deadline.left()))


def close(search: BudgetSearch) -> None:
    """Let HiGHS finish; again while what it finds exceeds a row that was not active."""
    active = 0
    while len(search.rows) > active and not search.finished():
        active = len(search.rows)
        _close_once(search)
        activate_exceeded(search)


def _close_once(search: BudgetSearch) -> None:
    """Remove labels by their bounds at the best multipliers, then let HiGHS finish."""
    graph = _refixed(search)
    search.statistics |= {"method": "branch and bound", "core_labels": graph.num_labels()}
    if graph.num_labels() > CLOSE_LABELS or search.deadline.left() <= 0.0:
        return
    found = _branch(search, graph, min(CLOSE_SECONDS, search.deadline.left()))
    if found.infeasible and search.plans.best is None:
        nothing_fits(search)
    # Removed labels cost more than the best plan, so the bound of the rest counts up to that plan.
    bound = np.inf if found.infeasible else found.bound
    search.bound = max(search.bound, min(bound, search.plans.objective()))


def _refixed(search: BudgetSearch) -> Graph:
    graph = search.graph.copy()
    if search.relaxation is not None:
        starts = search.relaxation.ascent.starts
        for index, node in enumerate(search.relaxation.nodes):
            kept = np.flatnonzero(~search.removed[starts[index] : starts[index + 1]])
            if 0 < len(kept) < graph.size(node):
                graph.restrict(node, kept)
        simplify(graph)
    labels = graph.num_labels()
    is_near = search.plans.best is not None and labels <= REFIX_LABELS
    for _ in range(REFIX_ROUNDS if is_near else 0):
        if not graph.nodes() or search.deadline.left() <= 0.0:
            break
        _fix(search, graph)
        simplify(graph)
        # The first round may be weak; later ones must earn their time.
        if graph.num_labels() > 0.95 * labels:
            break
        labels = graph.num_labels()
    return graph


def _fix(search: BudgetSearch, graph: Graph) -> None:
    """Remove labels whose bound exceeds the best plan, at several points of one ascent (one is weak)."""
    core, nodes = core_of(priced(graph, search.multipliers))
    if not nodes:
        return
    ascent = start_ascent(core)
    constant = graph.constant + float(search.multipliers @ (graph.weight_constant - search.plans.budgets))
    limit = search.plans.objective() * (1.0 + 1e-10) - constant
    survives = np.ones(ascent.node_costs.size, dtype=bool)
    for _ in range(REFIX_LOOKS):
        for _ in range(REFIX_SWEEPS):
            ascent.sweep(True)
            ascent.sweep(False)
        bounds = ascent.label_bounds(ascent.shared_messages())
        survives &= bounds.bound + bounds.slack <= limit
        # With every label of a smaller problem at hand, its bound is a bound of the whole.
        search.bound = max(search.bound, min(bounds.bound + constant, search.plans.objective()))
        if search.deadline.left() <= 0.0:
            break
    for index, node in enumerate(nodes):
        kept = np.flatnonzero(survives[ascent.starts[index] : ascent.starts[index + 1]])
        if 0 < len(kept) < graph.size(node):
            graph.restrict(node, kept)


def _branch(search: BudgetSearch, graph: Graph, seconds: float) -> mip.CoreSolution:
    """Solve what is left of `graph` within the budgets, by HiGHS; take the plan."""
    nodes = graph.nodes()
    if not nodes:
        plan = search.plans.take(back_substitute(graph, {}))
        fits = bool((search.plans.excess(plan)[search.rows] <= FITS).all())
        return mip.CoreSolution(labels=None, objective=plan.cost, bound=graph.constant, infeasible=not fits)
    core, _ = core_of(graph)
    arena = core.arena
    found = mip.solve_core(
        [arena[token] for token in core.costs],
        [(u, v, arena[matrix]) for u, v, matrix in core.edges],
        time_limit=seconds,
        weights=[graph.bytes_of(node, search.rows) for node in nodes],
        budgets=(search.plans.budgets - graph.weight_constant)[search.rows],
        relative_gap=min(search.gap, 1e-9),
        stop=search.deadline.stop,
    )
    if found.labels is not None:
        labels = {node: int(graph.domains[node][label]) for node, label in zip(nodes, found.labels, strict=True)}
        search.plans.take(back_substitute(graph, labels))
    return mip.CoreSolution(
        labels=found.labels,
        objective=found.objective + graph.constant,
        bound=found.bound + graph.constant,
        infeasible=found.infeasible,
    )
